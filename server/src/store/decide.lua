-- Decides a batch of calls inside Redis, in order of arrival, each in one atomic step: the twin of
-- store/memory.rs. Put before this text are `div_ceil`, `whole`, `level`, `window`, the table
-- `algorithms` (by tag) and `strike`, from the .lua files of their rooms.
--
-- ARGV[1], msgpack: { now, linger, rules, calls }
--   now     microseconds since 1970, or 0: ask this server's clock
--   linger  milliseconds that keys outlive their use, for tests with a clock of their own
--   rules   { { tag, burst, refill, scale, window, shadow, penalty }, ... }, penalty as in penalty.lua
--   calls   { { kind, { hit, ... }, number of keys }, ... }
--     kind 0, decide: hits { rule, at_least, at_most, reported, on_denial, valid_for }, indices from 1;
--             keys block, strikes, bucket and, where valid_for > 0, lease
--     kind 1, settle: one hit { rule, unused }; keys lease, bucket
-- Answer, msgpack: { { error, { row, ... } }, ... } in the same order, error '' if none
--     decide: row { code, granted, remaining, retry_after, reset_after, wait, replaced }
--             code 0 allowed, 1 over, 2 blocked; replaced 1 if the bucket was another algorithm's
--     settle: row { credited }

local now, linger, rule_rows, calls = unpack(cmsgpack.unpack(ARGV[1]))
if now == 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end

local rules = {}
for i, row in ipairs(rule_rows) do
  rules[i] = {
    tag = row[1],
    algorithm = algorithms[row[1]],
    limit = { burst = row[2], refill = row[3], scale = row[4], window = row[5] },
    shadow = row[6] == 1,
    penalty = { strikes = row[7][1], window = row[7][2], base = row[7][3], cap = row[7][4] },
  }
end

-- When a key ends: the point in time rounded up, not the span, since Redis adds a span to a whole millisecond
-- that has begun before now.
local set_end, expire_end = 'PXAT', 'PEXPIREAT'
if linger > 0 then
  set_end, expire_end = 'PX', 'PEXPIRE'
end
local function end_after(micros)
  if linger > 0 then return whole(div_ceil(micros, 1000) + linger) end
  return whole(div_ceil(now + micros, 1000))
end

local function put(key, value, micros)
  redis.call('SET', key, value, set_end, end_after(micros))
end

local function read_record(blocked_until, strikes)
  local record = { count = 0, forgotten = 0, blocked_until = 0 }
  -- Up to 16 digits are exact; anything else was not written here.
  if blocked_until and string.match(blocked_until, '^%d+$') and #blocked_until <= 16 then
    record.blocked_until = tonumber(blocked_until)
  end
  if strikes then
    local count, forgotten = string.match(strikes, '^(%d+) (%d+)$')
    if count and #strikes <= 27 then
      record.count, record.forgotten = tonumber(count), tonumber(forgotten)
    end
  end
  return record
end

local function file_record(keys, record)
  put(keys.strikes, whole(record.count) .. ' ' .. whole(record.forgotten), record.forgotten - now)
  if record.blocked_until > now then
    put(keys.block, whole(record.blocked_until), record.blocked_until - now)
  end
end

-- An algorithm that keeps more than words has a `load` of its own, and changes what is stored itself.
local function load_state(key, packed, rule)
  if rule.algorithm.load then return rule.algorithm.load(key) end
  if packed then
    local written_by, a, b, c, d, e = cmsgpack.unpack(packed)
    if written_by == rule.tag then return { a, b, c, d, e } end
  end
  local replaced = packed or redis.call('EXISTS', key) == 1
  return { 0, 0, 0, 0, 0, replaced = replaced }
end

local function put_state(key, rule, state, reset_after)
  if reset_after == 0 then
    redis.call('DEL', key)
  elseif rule.algorithm.load then
    redis.call(expire_end, key, end_after(reset_after))
  else
    put(key, cmsgpack.pack(rule.tag, state[1], state[2], state[3], state[4], state[5]), reset_after)
  end
end

local function blocked(retry_after)
  return { code = 2, granted = 0, remaining = 0, retry_after = retry_after, reset_after = retry_after, wait = 0 }
end

local function decide_hit(hit, rule, keys)
  local values = redis.call('MGET', keys.block, keys.strikes, keys.bucket)
  local record = read_record(values[1], values[2])
  if hit.reported > 0 and record.blocked_until <= now then
    record = strike(rule.penalty, record, now, hit.reported)
    file_record(keys, record)
  end
  if record.blocked_until > now then
    return blocked(record.blocked_until - now)
  end
  hit.state = load_state(keys.bucket, values[3], rule)
  local decision = rule.algorithm.decide(rule.limit, hit.state, now, hit.at_least, hit.at_most)
  decision.code = decision.denied and 1 or 0
  return decision
end

local function decide_call(rows, next_key)
  local hits, held_up = {}, false
  for i, row in ipairs(rows) do
    local hit = {
      rule = rules[row[1]], at_least = row[2], at_most = row[3],
      reported = row[4], on_denial = row[5] == 1, valid_for = row[6],
    }
    hit.keys = { block = next_key(), strikes = next_key(), bucket = next_key() }
    if hit.valid_for > 0 then hit.keys.lease = next_key() end
    hit.decision = decide_hit(hit, hit.rule, hit.keys)
    if hit.decision.code ~= 0 and not hit.rule.shadow then held_up = true end
    hits[i] = hit
  end

  local answer = {}
  for i, hit in ipairs(hits) do
    local rule, keys, decision = hit.rule, hit.keys, hit.decision
    if decision.code == 1 and hit.on_denial then
      -- Read again: another hit of this call may be on the same key.
      local values = redis.call('MGET', keys.block, keys.strikes)
      local record = strike(rule.penalty, read_record(values[1], values[2]), now, 1)
      decision.retry_after = math.max(decision.retry_after, record.blocked_until - now)
      file_record(keys, record)
    elseif decision.code == 0 and held_up then
      decision = rule.algorithm.decide(rule.limit, hit.state, now, 0, 0)
      decision.code = 0
    elseif decision.code == 0 and decision.granted > 0 then
      rule.algorithm.charge(rule.limit, hit.state, now, decision.granted)
      put_state(keys.bucket, rule, hit.state, decision.reset_after)
      if keys.lease then
        local valid_for = hit.valid_for
        if rule.algorithm.until_reset then valid_for = math.min(valid_for, decision.reset_after) end
        put(keys.lease, whole(decision.granted), valid_for)
      end
    end
    answer[i] = {
      decision.code, decision.granted, decision.remaining,
      decision.retry_after, decision.reset_after, decision.wait,
      hit.state and hit.state.replaced and 1 or 0,
    }
  end
  return answer
end

local function settle_call(rows, next_key)
  local rule, unused = rules[rows[1][1]], rows[1][2]
  local lease, bucket = next_key(), next_key()
  local values = redis.call('MGET', lease, bucket)
  if not values[1] then return { { 0 } } end
  redis.call('DEL', lease)
  local outstanding, state = tonumber(values[1]), load_state(bucket, values[2], rule)
  local credited = rule.algorithm.refund(rule.limit, state, now, math.min(unused, outstanding))
  if credited > 0 then
    local left = rule.algorithm.decide(rule.limit, state, now, 0, 0)
    put_state(bucket, rule, state, left.reset_after)
  end
  return { { credited } }
end

local answers, used = {}, 0
for i, call in ipairs(calls) do
  -- A call that fails must not shift the keys of the next.
  local mine = used
  local function next_key()
    mine = mine + 1
    return KEYS[mine]
  end
  used = used + call[3]
  local run = call[1] == 0 and decide_call or settle_call
  local ok, answer = pcall(run, call[2], next_key)
  if ok then
    answers[i] = { '', answer }
  else
    answers[i] = { type(answer) == 'table' and answer.err or tostring(answer), {} }
  end
end
return cmsgpack.pack(answers)
