-- Twin of window.rs: the same names, the same order, the same integers.

local window = {}

function window.length(limit)
  return limit.window
end

function window.taken(used, cost)
  if used + cost > 4503599627370495 then return 4503599627370495 end
  return used + cost
end

-- Returns denied, granted, remaining, retry_after, reset_after, wait.
function window.decide(limit, used, at_least, at_most, retry_after, reset_after)
  local remaining = limit.burst - used
  local in_debt = remaining < 0
  if in_debt then remaining = 0 end

  if in_debt or remaining < at_least then
    return true, 0, remaining, retry_after(), reset_after(0), 0
  end
  local granted = remaining
  if granted > at_most then granted = at_most end
  return false, granted, remaining - granted, 0, reset_after(granted), 0
end

return window
