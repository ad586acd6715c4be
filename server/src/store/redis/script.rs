//! The script that decides inside Redis, and how it is called.

use crate::algorithm::{self, Algorithm};
use crate::penalty;
use deadpool_redis::Connection;
use deadpool_redis::redis::{Cmd, ErrorKind, FromRedisValue, RedisResult, Script, ServerErrorKind};
use std::fmt::Write as _;
use std::sync::LazyLock;

/// What the algorithms and penalties say in Lua, put before `decide.lua`. A script call makes all its functions
/// anew, so an algorithm's are made when the first bucket asks for it.
pub(super) static SCRIPT: LazyLock<Script> = LazyLock::new(|| {
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
    Script::new(&(text + include_str!("../decide.lua")))
});

/// Sends what is said to the script, and once more if Redis has to be told the script first.
pub(super) async fn call<T: FromRedisValue>(command: &Cmd, connection: &mut Connection) -> RedisResult<T> {
    match command.query_async(connection).await {
        Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
            SCRIPT.prepare_invoke().load_async(connection).await?;
            command.query_async(connection).await
        }
        answer => answer,
    }
}
