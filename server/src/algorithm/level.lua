-- Twin of level.rs: the same names, the same order, the same integers.

local level = {}

local function capacity(limit)
  return limit.burst * limit.scale
end

function level.decide(limit, missing, step, at_least, at_most)
  local tokens = math.floor(math.max(capacity(limit) - missing, 0) / limit.scale)
  local in_debt = missing > capacity(limit)

  if in_debt or tokens < at_least then
    local room = math.max(capacity(limit) - level.units(limit, at_least), 0)
    return {
      denied = true,
      granted = 0,
      remaining = tokens,
      retry_after = level.flow(limit, math.max(missing - room, 0), step),
      reset_after = level.flow(limit, missing, step),
      wait = 0,
    }
  end
  local granted = math.min(tokens, at_most)
  return {
    denied = false,
    granted = granted,
    remaining = tokens - granted,
    retry_after = 0,
    reset_after = level.flow(limit, missing + level.units(limit, granted), step),
    wait = 0,
  }
end

function level.units(limit, cost)
  return cost * limit.scale
end

function level.rescaled(limit, missing, scale)
  if scale ~= 0 and scale ~= limit.scale then
    missing = div_ceil(missing, scale) * limit.scale
  end
  return math.min(missing, 9007199254740992)
end

function level.owed(limit)
  return 2 * capacity(limit)
end

function level.room(limit, missing, cost)
  return math.min(cost, div_ceil(missing, limit.scale))
end

function level.flow(limit, units, step)
  local micros = div_ceil(units, limit.refill)
  if micros == 0 then return 0 end
  return step + micros
end

return level
