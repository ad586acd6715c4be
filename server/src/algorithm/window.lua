-- Twin of window.rs: the same names, the same order, the same integers.

local window = {}

function window.length(limit)
  return limit.window
end

function window.decide(limit, used, at_least, at_most, retry_after, reset_after)
  local remaining = math.max(limit.burst - used, 0)
  local in_debt = used > limit.burst

  if in_debt or remaining < at_least then
    return {
      denied = true,
      granted = 0,
      remaining = remaining,
      retry_after = retry_after(),
      reset_after = reset_after(0),
      wait = 0,
    }
  end
  local granted = math.min(remaining, at_most)
  return {
    denied = false,
    granted = granted,
    remaining = remaining - granted,
    retry_after = 0,
    reset_after = reset_after(granted),
    wait = 0,
  }
end

return window
