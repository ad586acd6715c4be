-- Twin of token_bucket.rs: the same names, the same order, the same integers.
-- limit: { burst, refill, scale, window, capacity }; state: { missing, at, scale }

local function written(limit, state)
  return level.rescaled(limit, state[1], state[3])
end

local function missing(limit, state, now)
  return level.missing(limit, written(limit, state), state[2], now)
end

local function put(limit, state, missing, now, step)
  state[1], state[2], state[3] = missing, now + step, limit.scale
end

local function decide(limit, state, now, at_least, at_most)
  local missing, step = missing(limit, state, now)
  return level.decide(limit, missing, step, at_least, at_most)
end

local function charge(limit, state, now, cost)
  local missing, step = missing(limit, state, now)
  put(limit, state, level.taken(limit, missing, cost), now, step)
end

local function refund(limit, state, now, cost)
  if written(limit, state) > level.owed(limit) then return 0 end
  local missing, step = missing(limit, state, now)
  local credited = level.room(limit, missing, cost)
  if credited > 0 then
    put(limit, state, math.max(missing - credited * limit.scale, 0), now, step)
  end
  return credited
end

return { missing = missing, decide = decide, charge = charge, refund = refund }
