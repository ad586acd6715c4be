-- Twin of token_bucket.rs: the same names, the same order, the same integers.
-- limit: { burst, refill, scale, window }; state: { missing, at, scale }

local function written(limit, state)
  return level.rescaled(limit, state[1], state[3])
end

local function missing_now(limit, state, now)
  local at = state[2]
  local missing = math.min(written(limit, state), level.owed(limit))
  local elapsed = math.max(now - at, 0)
  local step = math.max(at - now, 0)
  if elapsed >= div_ceil(missing, limit.refill) then
    return 0, 0
  end
  return missing - elapsed * limit.refill, step
end

local function put(limit, state, missing, now, step)
  state[1], state[2], state[3] = missing, now + step, limit.scale
end

local function decide(limit, state, now, at_least, at_most)
  local missing, step = missing_now(limit, state, now)
  return level.decide(limit, missing, step, at_least, at_most)
end

local function charge(limit, state, now, cost)
  local missing, step = missing_now(limit, state, now)
  put(limit, state, missing + level.units(limit, cost), now, step)
end

local function refund(limit, state, now, cost)
  if written(limit, state) > level.owed(limit) then return 0 end
  local missing, step = missing_now(limit, state, now)
  local credited = level.room(limit, missing, cost)
  if credited > 0 then
    put(limit, state, math.max(missing - level.units(limit, credited), 0), now, step)
  end
  return credited
end

return { missing = missing_now, decide = decide, charge = charge, refund = refund }
