-- Decides a batch of calls inside Redis, in order of arrival, each in one atomic step: the twin of
-- store/memory.rs. Put before this text are `div_ceil`, `whole`, `level`, `window`, `algorithms` (by tag)
-- and `strike`, from the .lua files of their rooms.
--
-- KEYS: buckets first, then what else is read at once (blocks, leases that end, and new ones that may have been
-- granted before), then what is not (strikes, which are read where there is one to count, and other new leases). Each is there once, and is told by its place.
-- ARGV[1], msgpack: { now, linger, buckets, reads, asks, calls }
--   now      microseconds since 1970, or 0: ask this server's clock
--   linger   milliseconds that keys outlive their use, for tests with a clock of their own
--   buckets  how many keys are buckets
--   reads    how many keys are read, buckets among them
--   asks     what is asked of buckets, all that hits have in common: { { at_least, at_most, reported, on_denial,
--            counted, valid_for, shadow, quota, always, back, tag, burst, refill, scale, window, and of the penalty strikes,
--            window, base, cap }, ... }
--   calls    one flat list; of each call how many hits it has, or 0 for a settlement, and then
--            of each hit: ask, bucket, block, strikes, lease; 0 for a place that is not needed; and of one whose
--            gateway is counted: where, and its hash. counted is 0, or 1, or 2 + what it spends in a while, which gets its share and no more
--            of a settlement: ask, unused, lease, bucket
-- Answer, msgpack: { now, rows, errors }
--   rows     one flat list; of each hit a code and
--            0 allowed: granted, remaining, reset_after, wait
--            1 over: remaining, retry_after, reset_after, how many words the state has, and those
--            2 blocked: retry_after
--            3 failed: nothing
--            with 4 more if the bucket was another algorithm's, and then how many gateways there are, if they were
--            counted; of each settlement: what is credited
--   errors   { { number of the call from 1, error }, ... }; what their rows say is not so
--
-- This is the path that every decision takes, so what is done once a batch is not done once a call.

local ALLOWED, OVER, BLOCKED, FAILED, REPLACED = 0, 1, 2, 3, 4
local HIT, SETTLEMENT = 5, 4
-- Five words of 2^53.
local LARGEST = 45035996273704960

local call, pack = redis.call, cmsgpack.pack

local now, linger, bucket_count, read_count, ask_rows, calls = unpack(cmsgpack.unpack(ARGV[1]))
if now == 0 then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end

local asks = {}
for i, row in ipairs(ask_rows) do
  local at_least, at_most, reported, on_denial, counted, valid_for, shadow, quota, always, back, tag, burst, refill,
    scale, window, strikes, forgotten, base, cap = unpack(row)
  local algorithm = algorithms[tag]
  asks[i] = {
    at_least = at_least,
    at_most = at_most,
    reported = reported,
    on_denial = on_denial == 1,
    counted = counted,
    valid_for = valid_for,
    shadow = shadow == 1,
    quota = quota == 1,
    always = always,
    back = back,
    tag = tag,
    algorithm = algorithm,
    decide = algorithm.decide,
    charge = algorithm.charge,
    limit = { burst = burst, refill = refill, scale = scale, window = window, capacity = burst * scale },
    penalty = { strikes = strikes, window = forgotten, base = base, cap = cap },
  }
end

-- When a key ends, in milliseconds: the point in time rounded up, not the span, since Redis adds a span to a
-- whole millisecond that has begun before now.
local set_end, expire_end = 'PXAT', 'PEXPIREAT'
if linger > 0 then
  set_end, expire_end = 'PX', 'PEXPIRE'
end
local function end_after(micros)
  if linger > 0 then return div_ceil(micros, 1000) + linger end
  return div_ceil(now + micros, 1000)
end

local function put(key, value, micros)
  call('SET', key, value, set_end, whole(end_after(micros)))
end

-- Where the calls are being read: the next one, and of the one that is being decided its number, where it starts
-- and how many hits it has.
local at, number, start, hits = 1, 0, 0, 0

-- By place: what was stored, and of buckets what is known since. A bucket is read once and written once, however
-- many calls of the batch are on it (a log, which keeps more than words, is looked at and added to by each): `asked` tells what for, `resets` when it is as good as new if it has to be
-- written, `ends` when the stored one ends.
local stored = call('MGET', unpack(KEYS, 1, read_count))
local states, asked, resets, ends = {}, {}, {}, {}

-- An algorithm that keeps more than words is no string, so it looks like nothing.
local others = false
do
  local nothing, count = {}, 0
  for place = 1, bucket_count do
    if not stored[place] then
      count = count + 1
      nothing[count] = KEYS[place]
    end
  end
  if count > 0 then others = call('EXISTS', unpack(nothing)) > 0 end
end

-- A new end costs Redis as much as all else of a write. So a bucket is kept up to a second longer than it needs,
-- though no longer than it takes to fill, and until then it is written without one.
local SPARE = 1000
local function write_bucket(place)
  local key, state, ask, reset_after = KEYS[place], states[place], asked[place], resets[place]
  if reset_after == 0 then
    call('DEL', key)
  elseif ask.algorithm.load then
    call(expire_end, key, whole(end_after(reset_after)))
  else
    local needed, ends_at = end_after(reset_after), ends[place]
    if linger == 0 and needed <= ends_at then
      call('SET', key, pack(ask.tag, ends_at, state[1], state[2], state[3], state[4], state[5]), 'KEEPTTL')
    else
      ends_at = math.max(needed, math.min(needed + SPARE, end_after(ask.limit.window)))
      local packed = pack(ask.tag, ends_at, state[1], state[2], state[3], state[4], state[5])
      call('SET', key, packed, set_end, whole(ends_at))
    end
  end
  resets[place] = nil
end

local function read_bucket(place, ask)
  local packed = stored[place]
  -- One that keeps more than words has a `load` of its own, and changes what is stored itself.
  if ask.algorithm.load then return ask.algorithm.load(KEYS[place]) end
  if packed then
    local written_by, ends_at, a, b, c, d, e = cmsgpack.unpack(packed)
    if written_by == ask.tag then
      -- What was not written here spoils its own call, before it gets into the answers of all.
      if a % 1 + b % 1 + c % 1 + d % 1 + e % 1 ~= 0 or a < 0 or b < 0 or c < 0 or d < 0 or e < 0
        or a + b + c + d + e > LARGEST then
        error('the state of ' .. KEYS[place] .. ' is none', 0)
      end
      ends[place] = ends_at
      return { a, b, c, d, e }
    end
  end
  local state = { 0, 0, 0, 0, 0 }
  if packed or others and call('EXISTS', KEYS[place]) == 1 then state.replaced = true end
  ends[place] = 0
  return state
end

local function state_of(place, ask)
  local before = asked[place]
  if before then
    if before.tag == ask.tag then return states[place] end
    -- The calls before were of another algorithm: a rule has just changed.
    if resets[place] then write_bucket(place) end
    stored[place], others = call('MGET', KEYS[place])[1], true
  end
  local state = read_bucket(place, ask)
  states[place], asked[place] = state, ask
  return state
end

-- The number that is stored there, or 0. Up to 16 digits are exact; anything else was not written here.
local function number_at(place)
  local text = stored[place]
  if text and #text <= 16 and string.match(text, '^%d+$') then return tonumber(text) end
  return 0
end

-- Returns until when the key is blocked then.
local function count_strikes(penalty, block, strikes, more)
  local record = { count = 0, forgotten = 0, blocked_until = number_at(block) }
  local before = call('MGET', KEYS[strikes])[1]
  if before and #before <= 27 then
    local count, forgotten = string.match(before, '^(%d+) (%d+)$')
    if count then record.count, record.forgotten = tonumber(count), tonumber(forgotten) end
  end
  record = strike(penalty, record, now, more)
  put(KEYS[strikes], whole(record.count) .. ' ' .. whole(record.forgotten), record.forgotten - now)
  stored[block] = whole(record.blocked_until)
  if record.blocked_until > now then
    put(KEYS[block], stored[block], record.blocked_until - now)
  end
  return record.blocked_until
end

-- What buckets were before a call that may fail after it has changed them.
local undo = {}
local function keep(bucket, state)
  undo[#undo + 1] = { bucket, resets[bucket], state.replaced, state[1], state[2], state[3], state[4], state[5] }
end

-- Returns how many tokens there was room for, and what is left then: remaining, reset_after, wait, state.
local function give_back(bucket, ask, tokens)
  local state = state_of(bucket, ask)
  if hits > 1 then keep(bucket, state) end
  local credited = ask.algorithm.refund(ask.limit, state, now, tokens)
  local _, _, remaining, _, reset_after, wait = ask.decide(ask.limit, state, now, 0, 0)
  if credited > 0 then resets[bucket] = reset_after end
  return credited, remaining, reset_after, wait, state
end

-- Gateways that were not heard of for so many microseconds are not counted, and of a bucket no more than so many.
local COUNTED_FOR, MOST_GATEWAYS = 5000000, 256

-- Returns how many there are with this one.
local function hear(gateways, hash)
  local key = KEYS[gateways]
  call('ZADD', key, whole(now), whole(hash))
  call('ZREMRANGEBYSCORE', key, '-inf', whole(now - COUNTED_FOR))
  call('ZREMRANGEBYRANK', key, 0, -1 - MOST_GATEWAYS)
  call(expire_end, key, whole(end_after(COUNTED_FOR)))
  return call('ZCARD', key)
end

-- What was granted when that lease was asked for before; nothing if it was not, or if nothing was. A lease that can
-- not have been asked for before is not read.
local function lent(lease)
  return lease > 0 and lease <= read_count and number_at(lease) or 0
end

-- Of the hit that is being decided, if they were counted.
local gateways = 0

-- Returns code, granted, remaining, retry_after, reset_after, wait, state.
local function judge(hit, ask)
  local lease = calls[hit + 4]
  if lent(lease) > 0 then
    local state = state_of(calls[hit + 1], ask)
    local _, _, remaining, _, reset_after, wait = ask.decide(ask.limit, state, now, 0, 0)
    return ALLOWED, lent(lease), remaining, 0, reset_after, wait, state
  end
  if ask.back > 0 then
    local _, remaining, reset_after, wait, state = give_back(calls[hit + 1], ask, ask.back)
    return ALLOWED, 0, remaining, 0, reset_after, wait, state
  end
  local block, ends_at = calls[hit + 2], 0
  if stored[block] then ends_at = number_at(block) end
  local may_be_again = lease > 0 and lease <= read_count
  if ask.reported > 0 and ends_at <= now and not (may_be_again and stored[lease]) then
    ends_at = count_strikes(ask.penalty, block, calls[hit + 3], ask.reported)
    -- If nothing is granted, it is still known that these were counted.
    if may_be_again then
      stored[lease] = '0'
      put(KEYS[lease], stored[lease], ask.valid_for)
    end
  end
  if ends_at > now then return BLOCKED, 0, 0, ends_at - now end
  local state = state_of(calls[hit + 1], ask)
  local at_most = ask.at_most
  if ask.counted > 1 then
    local _, _, remaining = ask.decide(ask.limit, state, now, 0, 0)
    local half, all = math.floor(remaining / (2 * gateways)), math.floor(remaining / gateways)
    local share = math.max(half, math.min(ask.counted - 2, all))
    at_most = math.min(at_most, math.max(share, ask.at_least))
  end
  local denied, granted, remaining, retry_after, reset_after, wait =
    ask.decide(ask.limit, state, now, ask.at_least, at_most)
  return denied and OVER or ALLOWED, granted, remaining, retry_after, reset_after, wait, state
end

local function lend(lease, ask, granted, reset_after)
  local valid_for = ask.valid_for
  if ask.algorithm.until_reset then valid_for = math.min(valid_for, reset_after) end
  local text = whole(granted)
  put(KEYS[lease], text, valid_for)
  if lease <= read_count then stored[lease] = text end
end

local function charge(bucket, ask, state, tokens, reset_after)
  if hits > 1 or ask.on_denial then keep(bucket, state) end
  ask.charge(ask.limit, state, now, tokens)
  if state.replaced then state.replaced = nil end
  resets[bucket] = reset_after
end

-- Takes what was denied all the same, and decides anew: for the waits. Returns remaining, retry_after, reset_after.
local function overdraw(bucket, ask, state)
  charge(bucket, ask, state, ask.always)
  local _, _, remaining, retry_after, reset_after = ask.decide(ask.limit, state, now, ask.at_least, ask.at_most)
  resets[bucket] = reset_after
  return remaining, retry_after, reset_after
end

local rows, size = {}, 0

-- Charges what is granted, counts what is denied, and answers.
local function commit(hit, ask, held_up, code, granted, remaining, retry_after, reset_after, wait, state)
  -- To what gives back, another algorithm's bucket is a full one.
  local again = lent(calls[hit + 4]) > 0
  local replaced = state and state.replaced and ask.back == 0 and not again and REPLACED or 0
  if code == ALLOWED then
    if again then
      -- It was paid for then.
    elseif held_up and ask.always == 0 and ask.back == 0 then
      local _
      _, granted, remaining, _, reset_after, wait = ask.decide(ask.limit, state, now, 0, 0)
    elseif granted > 0 then
      -- First what can fail: a lease that is not filed is not paid for.
      if ask.valid_for > 0 then lend(calls[hit + 4], ask, granted, reset_after) end
      charge(calls[hit + 1], ask, state, granted, reset_after)
    end
    rows[size + 1], rows[size + 2], rows[size + 3], rows[size + 4], rows[size + 5] =
      ALLOWED + replaced, granted, remaining, reset_after, wait
    size = size + 5
  elseif code == OVER then
    if ask.always > 0 then
      remaining, retry_after, reset_after = overdraw(calls[hit + 1], ask, state)
    end
    if ask.on_denial then
      local ends_at = count_strikes(ask.penalty, calls[hit + 2], calls[hit + 3], 1)
      retry_after = math.max(retry_after, ends_at - now)
    end
    local words = #state
    rows[size + 1], rows[size + 2], rows[size + 3], rows[size + 4], rows[size + 5] =
      OVER + replaced, remaining, retry_after, reset_after, words
    for i = 1, words do rows[size + 5 + i] = state[i] end
    size = size + 5 + words
  else
    rows[size + 1], rows[size + 2] = BLOCKED, retry_after
    size = size + 2
  end
end

local function decide_call(at, hits)
  if hits == 1 then
    local ask = asks[calls[at]]
    if ask.counted == 0 then return commit(at, ask, false, judge(at, ask)) end
    gateways = hear(calls[at + HIT], calls[at + HIT + 1])
    commit(at, ask, false, judge(at, ask))
    size = size + 1
    rows[size] = gateways
    return
  end
  local judged, held_up, quotas, denied_quotas = {}, false, 0, 0
  for i = 1, hits do
    local hit = at + HIT * (i - 1)
    local ask = asks[calls[hit]]
    judged[i] = { judge(hit, ask) }
    local denied = judged[i][1] ~= ALLOWED
    if ask.quota and not ask.shadow then
      quotas = quotas + 1
      if denied then denied_quotas = denied_quotas + 1 end
    elseif denied and not ask.shadow then
      held_up = true
    end
  end
  -- Quotas are several ways to pay.
  if quotas > 0 and quotas == denied_quotas then held_up = true end
  for i = 1, hits do
    local hit = at + HIT * (i - 1)
    commit(hit, asks[calls[hit]], held_up, unpack(judged[i], 1, 7))
  end
end

local function settle_call(at)
  local ask, unused, lease, bucket = unpack(calls, at, at + SETTLEMENT - 1)
  ask = asks[ask]
  local outstanding, credited = number_at(lease), 0
  -- A bucket that can not be read leaves the lease as it is.
  if outstanding > 0 then state_of(bucket, ask) end
  if stored[lease] then
    call('DEL', KEYS[lease])
    stored[lease] = false
  end
  if outstanding > 0 then credited = give_back(bucket, ask, math.min(unused, outstanding)) end
  size = size + 1
  rows[size] = credited
end

local errors = {}
local function failed(number, error)
  errors[#errors + 1] = { number, type(error) == 'table' and error.err or tostring(error) }
end

-- Calls one function for each call.
local function each(run)
  local stop = #calls
  while at <= stop do
    number, start, hits = number + 1, at + 1, calls[at]
    at = start + (hits > 0 and HIT * hits or SETTLEMENT)
    if hits == 1 and asks[calls[start]].counted > 0 then at = at + 2 end
    run()
  end
end

local before
local function decide()
  before, undo = size, {}
  if hits > 0 then decide_call(start, hits) else settle_call(start) end
end

repeat
  local ok, error = pcall(each, decide)
  if not ok then
    -- That of the call that has just begun; the others go on.
    failed(number, error)
    for i = #undo, 1, -1 do
      local bucket, reset_after, replaced, a, b, c, d, e = unpack(undo[i], 1, 8)
      local state = states[bucket]
      resets[bucket], state.replaced = reset_after, replaced
      if a then state[1], state[2], state[3], state[4], state[5] = a, b, c, d, e end
    end
    for i = #rows, before + 1, -1 do rows[i] = nil end
    for i = 1, math.max(hits, 1) do rows[before + i] = FAILED end
    size = before + math.max(hits, 1)
  end
until ok

for place = 1, bucket_count do
  if resets[place] then
    local ok, error = pcall(write_bucket, place)
    if not ok then
      at, number = 1, 0
      each(function()
        if hits == 0 and calls[start + 3] == place then failed(number, error) end
        for i = 1, hits do
          if calls[start + HIT * (i - 1) + 1] == place then failed(number, error) end
        end
      end)
    end
  end
end
return pack({ now, rows, errors })
