//! The scripts that run inside Redis, and how they are called.

use super::connections::Connection;
use crate::algorithm::{self, Algorithm};
use crate::penalty;
use deadpool_redis::redis::{
    self, Arg, Cmd, ErrorKind, FromRedisValue, RedisResult, ServerErrorKind, from_redis_value,
};
use std::fmt::Write as _;
use std::sync::LazyLock;

/// A script, which is known by its hash once it was sent.
pub(super) struct Script {
    text: String,
    hash: String,
}

impl Script {
    fn new(text: String) -> Self {
        let hash = redis::Script::new(&text).get_hash().to_owned();
        Self { text, hash }
    }

    /// The start of a call of it: to be followed by how many keys there are, these, and what else it is told.
    pub(super) fn by_hash(&self, arguments: usize, bytes: usize) -> Cmd {
        let mut command = Cmd::with_capacity(2 + arguments, self.hash.len() + bytes);
        command.arg("EVALSHA").arg(&self.hash);
        command
    }

    /// The same call, by the text instead of the hash.
    fn by_text(&self, by_hash: &Cmd) -> Cmd {
        let mut command = Cmd::new();
        command.arg("EVAL").arg(&self.text);
        for argument in by_hash.args_iter().skip(2) {
            if let Arg::Simple(argument) = argument {
                command.arg(argument);
            }
        }
        command
    }
}

/// Does what decisions need to be able to do: run a script that writes; nobody ever sees the key. Then it tells how
/// many instances [listen](super::presence), if it may know, and if it is asked to what Redis says of its memory.
pub(super) static HEARTBEAT: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "redis.call('SET', KEYS[1], '', 'PX', 1000)\n\
         redis.call('DEL', KEYS[1])\n\
         local instances = redis.pcall('PUBSUB', 'NUMSUB', ARGV[1])[2] or 0\n\
         local memory = ARGV[2] == '1' and redis.pcall('INFO', 'memory')\n\
         return { instances, type(memory) == 'string' and memory or '' }"
            .to_owned(),
    )
});

/// What the algorithms and penalties say in Lua, put before `decide.lua`. A script call makes all its functions
/// anew, so an algorithm's are made when the first bucket asks for it.
pub(super) static DECIDE: LazyLock<Script> = LazyLock::new(|| {
    let mut text = String::from(
        "local function div_ceil(a, b)\n\
         local rest = a % b\n\
         if rest > 0 then return (a - rest) / b + 1 end\n\
         return a / b\n\
         end\n\
         local format = string.format\n\
         local function whole(number) return format('%d', number) end\n\
         local makers = {}\n\
         local algorithms = setmetatable({}, { __index = function(made, tag)\n\
         made[tag] = makers[tag]()\n\
         return made[tag]\n\
         end })\n",
    );
    let mut chunk = |name: &str, lua: &str, call: &str| {
        // Writing to a string can not fail.
        writeln!(text, "{name} = (function()\n{lua}\nend){call}").unwrap_or_default();
    };
    for (name, lua) in algorithm::SHARED_LUA {
        chunk(&format!("local {name}"), lua, "()");
    }
    for Algorithm { tag, lua, .. } in algorithm::ALL {
        chunk(&format!("makers[{tag}]"), lua, "");
    }
    chunk("local strike", penalty::LUA, "()");
    Script::new(text + include_str!("../decide.lua"))
});

/// Sends a call of that script about keys of that slot, and once more with its text if this Redis does not know it yet.
pub(super) async fn call<T: FromRedisValue>(
    script: &Script,
    slot: u16,
    by_hash: &Cmd,
    connection: &mut Connection,
) -> RedisResult<T> {
    let answer = match connection.ask(slot, by_hash).await {
        Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
            connection.ask(slot, &script.by_text(by_hash)).await
        }
        answer => answer,
    };
    Ok(from_redis_value(answer?)?)
}
