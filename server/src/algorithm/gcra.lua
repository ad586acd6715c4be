-- Twin of gcra.rs: the same names, the same order, the same integers.
-- limit: { burst, refill, scale, window }; state: { tat, part, at, refill, scale }

local function written(limit, state)
  local tat, part, at, refill, scale = state[1], state[2], state[3], state[4], state[5]
  return level.rescaled(limit, (tat - at) * refill + part, scale)
end

local function ahead_now(limit, state, now)
  local at = state[3]
  local ahead = math.min(written(limit, state), level.owed(limit))
  local elapsed = math.max(now - at, 0)
  local step = math.max(at - now, 0)
  if elapsed >= div_ceil(ahead, limit.refill) then
    return 0, 0
  end
  return ahead - elapsed * limit.refill, step
end

local function put(limit, state, ahead, now, step)
  local at = now + step
  local whole = math.floor(ahead / limit.refill)
  state[1], state[2] = at + whole, ahead - whole * limit.refill
  state[3], state[4], state[5] = at, limit.refill, limit.scale
end

local function decide(limit, state, now, at_least, at_most)
  local ahead, step = ahead_now(limit, state, now)
  return level.decide(limit, ahead, step, at_least, at_most)
end

local function charge(limit, state, now, cost)
  local ahead, step = ahead_now(limit, state, now)
  put(limit, state, ahead + level.units(limit, cost), now, step)
end

local function refund(limit, state, now, cost)
  if written(limit, state) > level.owed(limit) then return 0 end
  local ahead, step = ahead_now(limit, state, now)
  local credited = level.room(limit, ahead, cost)
  if credited > 0 then
    put(limit, state, math.max(ahead - level.units(limit, credited), 0), now, step)
  end
  return credited
end

return { decide = decide, charge = charge, refund = refund }
