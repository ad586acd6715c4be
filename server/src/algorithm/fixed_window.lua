-- Twin of fixed_window.rs: the same names, the same order, the same integers.
-- limit: { burst, refill, scale, window }; state: { last, used }

local function used_now(limit, state, now)
  local last, used = state[1], state[2]
  local at = last > now and last or now
  local length = window.length(limit)
  if used > 0 and last - last % length == at - at % length then
    return used, at
  end
  return 0, now
end

local function decide(limit, state, now, at_least, at_most)
  local used, at = used_now(limit, state, now)
  local length = window.length(limit)
  local finish = at - at % length + length
  local rest = finish - now
  local function retry_after() return rest end
  local function reset_after(granted)
    if used + granted == 0 then return 0 end
    return rest
  end
  return window.decide(limit, used, at_least, at_most, retry_after, reset_after)
end

local function charge(limit, state, now, cost)
  local used, at = used_now(limit, state, now)
  state[1], state[2] = at, window.taken(used, cost)
end

local function refund(limit, state, now, cost)
  local used, at = used_now(limit, state, now)
  local credited = math.min(cost, used)
  if credited > 0 then
    state[1], state[2] = at, used - credited
  end
  return credited
end

return { decide = decide, charge = charge, refund = refund, until_reset = true }
