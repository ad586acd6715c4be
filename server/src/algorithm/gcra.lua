-- Twin of gcra.rs: the same names, the same order, the same integers.
-- limit: { burst, refill, scale, window, capacity }; state: { tat, part, at, refill, scale }

local function written(limit, state)
  local tat, part, at, refill, scale = state[1], state[2], state[3], state[4], state[5]
  return level.rescaled(limit, (tat - at) * refill + part, scale)
end

local function ahead(limit, state, now)
  return level.missing(limit, written(limit, state), state[3], now)
end

local function put(limit, state, ahead, now, step)
  local at, rest = now + step, ahead % limit.refill
  state[1], state[2] = at + (ahead - rest) / limit.refill, rest
  state[3], state[4], state[5] = at, limit.refill, limit.scale
end

local function decide(limit, state, now, at_least, at_most)
  local ahead, step = ahead(limit, state, now)
  return level.decide(limit, ahead, step, at_least, at_most)
end

local function charge(limit, state, now, cost)
  local ahead, step = ahead(limit, state, now)
  put(limit, state, level.taken(limit, ahead, cost), now, step)
end

local function refund(limit, state, now, cost)
  if written(limit, state) > level.owed(limit) then return 0 end
  local ahead, step = ahead(limit, state, now)
  local credited = level.room(limit, ahead, cost)
  if credited > 0 then
    put(limit, state, math.max(ahead - credited * limit.scale, 0), now, step)
  end
  return credited
end

return { decide = decide, charge = charge, refund = refund }
