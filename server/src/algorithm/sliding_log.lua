-- Twin of sliding_log.rs: the same names, the same integers. The log is a sorted set: the score of a grant is
-- its time, its member the tokens granted until then and the cost, `<16 digits>:<cost>`, which sorts grants of
-- one moment too. A decision is O(log n); a denied one looks for the grant that has to go, O(log n) looks.
-- limit: { burst, refill, scale, window }; state: { key, replaced, size, first, last }

local function grant(reply)
  if not reply[1] then return nil end
  local total, cost = string.match(reply[1], '^(%d+):(%d+)$')
  local at = tonumber(reply[2])
  if not total or #reply[1] > 33 or at % 1 ~= 0 or at < 0 or at > 9007199254740992 then
    error('a grant that is none', 0)
  end
  return { at = at, total = tonumber(total), cost = tonumber(cost) }
end

local function ranked(key, rank)
  return grant(redis.call('ZRANGE', key, rank, rank, 'WITHSCORES'))
end

local function load(key)
  local reply = redis.pcall('ZRANGE', key, -1, -1, 'WITHSCORES')
  -- Another algorithm's state is a string.
  if reply.err then return { key = key, replaced = true } end
  return { key = key, last = grant(reply) }
end

local function see(limit, state, now)
  local last = state.last
  if not last then return { at = now, before = 0, total = 0 } end
  local at = math.max(now, last.at)
  local older = at - window.length(limit)
  local first = grant(redis.call('ZRANGEBYSCORE', state.key, '(' .. whole(older), '+inf',
    'WITHSCORES', 'LIMIT', 0, 1))
  local before = last.total
  if first then before = first.total - first.cost end
  return { at = at, older = older, before = before, total = last.total, first = first }
end

-- The rank of the first grant until which at least `total` tokens had been granted.
local function reaching(key, total)
  local low, high = 0, redis.call('ZCARD', key) - 1
  while low < high do
    local middle = math.floor((low + high) / 2)
    if ranked(key, middle).total < total then
      low = middle + 1
    else
      high = middle
    end
  end
  return low
end

local function forget_older(state, seen)
  if state.replaced then
    redis.call('DEL', state.key)
  elseif seen.older then
    redis.call('ZREMRANGEBYSCORE', state.key, '-inf', whole(seen.older))
  end
end

local function add(state, at, total, cost)
  redis.call('ZADD', state.key, whole(at), string.format('%016.0f:%.0f', total, cost))
  state.last = { at = at, total = total, cost = cost }
end

local function decide(limit, state, now, at_least, at_most)
  local seen = see(limit, state, now)
  local used = seen.total - seen.before
  local length = window.length(limit)

  local function retry_after()
    local to_go = math.max(used + math.min(at_least, limit.burst) - limit.burst, 1)
    local goes = seen.first
    if not goes then return 0 end
    -- Mostly the oldest grant is all that has to go.
    if goes.total < seen.before + to_go then
      goes = ranked(state.key, reaching(state.key, seen.before + to_go))
    end
    return goes.at + length - now
  end
  local function reset_after(granted)
    if granted > 0 then return seen.at + length - now end
    if used > 0 then return state.last.at + length - now end
    return 0
  end
  return window.decide(limit, used, at_least, at_most, retry_after, reset_after)
end

local function charge(limit, state, now, cost)
  local seen = see(limit, state, now)
  local used = seen.total - seen.before
  forget_older(state, seen)
  local before = seen.before
  if used == 0 then before = 0 end
  -- Nobody owes more than another burst.
  cost = math.min(cost, math.max(2 * limit.burst - used, 0))
  if cost == 0 then return end
  local grown = cost
  if used > limit.burst then
    -- In debt the last grant grows, so that there are never more of them than tokens in a burst, and one.
    grown = grown + state.last.cost
    redis.call('ZREMRANGEBYRANK', state.key, -1, -1)
  end
  add(state, seen.at, before + used + cost, grown)
end

local function refund(limit, state, now, cost)
  local seen = see(limit, state, now)
  local credited = math.min(cost, seen.total - seen.before)
  if credited == 0 then return 0 end
  -- What is older would be back if the time of the last grant goes with it.
  forget_older(state, seen)
  -- The latest grants are the ones that are given back.
  local total = seen.total - credited
  local rank = reaching(state.key, total)
  local cut = ranked(state.key, rank)
  local before = cut.total - cut.cost
  redis.call('ZREMRANGEBYRANK', state.key, rank, -1)
  if before < total then
    add(state, cut.at, total, total - before)
  else
    state.last = ranked(state.key, -1)
  end
  return credited
end

return { load = load, decide = decide, charge = charge, refund = refund }
