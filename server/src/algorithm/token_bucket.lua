-- Twin of token_bucket.rs: the same names, the same order, the same integers.
-- limit: { burst, count, period, refill, scale }; state: { missing, at, scale }

local function capacity(limit)
  return limit.burst * limit.scale
end

local function units(limit, cost)
  return cost * limit.scale
end

local function flow(limit, units, step)
  local micros = div_ceil(units, limit.refill)
  if micros == 0 then return 0 end
  return step + micros
end

local function missing_now(limit, state, now)
  local missing, at, scale = state[1], state[2], state[3]
  if scale ~= 0 and scale ~= limit.scale then
    missing = div_ceil(missing, scale) * limit.scale
  end
  missing = math.min(missing, 2 * capacity(limit))

  local elapsed = math.max(now - at, 0)
  local step = math.max(at - now, 0)
  if elapsed >= div_ceil(missing, limit.refill) then
    -- Full is as good as new: it does not remember when it became so.
    return 0, 0
  end
  return missing - elapsed * limit.refill, step
end

local function decide(limit, state, now, at_least, at_most)
  local missing, step = missing_now(limit, state, now)
  local tokens = math.floor(math.max(capacity(limit) - missing, 0) / limit.scale)
  local in_debt = missing > capacity(limit)

  if in_debt or tokens < at_least then
    local room = math.max(capacity(limit) - units(limit, at_least), 0)
    return {
      denied = true,
      granted = 0,
      remaining = tokens,
      retry_after = flow(limit, math.max(missing - room, 0), step),
      reset_after = flow(limit, missing, step),
      wait = 0,
    }
  end
  local granted = math.min(tokens, at_most)
  return {
    denied = false,
    granted = granted,
    remaining = tokens - granted,
    retry_after = 0,
    reset_after = flow(limit, missing + units(limit, granted), step),
    wait = 0,
  }
end

local function charge(limit, state, now, cost)
  local missing, step = missing_now(limit, state, now)
  state[1], state[2], state[3] = missing + units(limit, cost), now + step, limit.scale
end

local function refund(limit, state, now, cost)
  local missing, step = missing_now(limit, state, now)
  local credited = math.min(cost, div_ceil(missing, limit.scale))
  if credited == 0 then return 0 end
  state[1], state[2], state[3] = math.max(missing - units(limit, credited), 0), now + step, limit.scale
  return credited
end

return { decide = decide, charge = charge, refund = refund }
