-- Twin of level.rs: the same names, the same order, the same integers.
-- limit: { burst, refill, scale, window, capacity }

local level = {}

-- Returns denied, granted, remaining, retry_after, reset_after, wait.
function level.decide(limit, missing, step, at_least, at_most)
  local capacity, scale, flow = limit.capacity, limit.scale, level.flow
  local left = capacity - missing
  local in_debt = left < 0
  if in_debt then left = 0 end
  local tokens = (left - left % scale) / scale

  if in_debt or tokens < at_least then
    local room = math.max(capacity - at_least * scale, 0)
    local retry_after = flow(limit, math.max(missing - room, 0), step)
    return true, 0, tokens, retry_after, flow(limit, missing, step), 0
  end
  local granted = tokens
  if granted > at_most then granted = at_most end
  return false, granted, tokens - granted, 0, flow(limit, missing + granted * scale, step), 0
end

function level.rescaled(limit, missing, scale)
  if scale ~= 0 and scale ~= limit.scale then
    missing = div_ceil(missing, scale) * limit.scale
  end
  if missing > 9007199254740992 then return 9007199254740992 end
  return missing
end

function level.owed(limit)
  return 2 * limit.capacity
end

-- Returns what is missing now, and how far `at` is ahead of now.
function level.missing(limit, written, at, now)
  local missing, elapsed, step = written, now - at, 0
  local most = level.owed(limit)
  if missing > most then missing = most end
  if elapsed < 0 then elapsed, step = 0, -elapsed end
  local flowed = elapsed * limit.refill
  if flowed >= missing then return 0, 0 end
  return missing - flowed, step
end

function level.taken(limit, missing, cost)
  local taken, most = missing + cost * limit.scale, level.owed(limit)
  if taken > most then return most end
  return taken
end

function level.room(limit, missing, cost)
  return math.min(cost, div_ceil(missing, limit.scale))
end

function level.flow(limit, units, step)
  if units == 0 then return 0 end
  return step + div_ceil(units, limit.refill)
end

return level
