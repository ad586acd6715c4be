-- Twin of sliding_window.rs: the same names, the same order, the same integers.
-- limit: { burst, refill, scale, window }; state: { last, current, previous }

local function most_counted(limit)
  return math.floor(9007199254740990 / window.length(limit))
end

local function see(limit, state, now)
  local last = state[1]
  local at = last > now and last or now
  local length = window.length(limit)
  local most = most_counted(limit)
  local is_cut = math.max(state[2], state[3]) > most
  local current, previous = math.min(state[2], most), math.min(state[3], most)
  local passed = (at - at % length) - (last - last % length)
  if passed == length then
    current, previous = 0, current
  elseif passed > length then
    current, previous = 0, 0
  end
  if current + previous == 0 then at = now end
  return { at = at, current = current, previous = previous, is_cut = is_cut }
end

local function decide(limit, state, now, at_least, at_most)
  local seen = see(limit, state, now)
  local length = window.length(limit)
  local rest = length - seen.at % length
  local used = seen.current + div_ceil(seen.previous * rest, length)
  local step = seen.at - now

  local function retry_after()
    local free = math.max(limit.burst - at_least, 0)
    local function left(room, count)
      if count == 0 then return length end
      return math.min(math.floor(room * length / count), length)
    end
    local room = free - seen.current
    if room >= 0 then
      return step + rest - math.min(left(room, seen.previous), rest)
    end
    return step + rest + length - left(free, seen.current)
  end
  local function reset_after(granted)
    if seen.current + granted > 0 then return step + rest + length end
    if seen.previous > 0 then return step + rest end
    return 0
  end
  return window.decide(limit, used, at_least, at_most, retry_after, reset_after)
end

local function charge(limit, state, now, cost)
  local seen = see(limit, state, now)
  local current = math.min(window.taken(seen.current, cost), most_counted(limit))
  state[1], state[2], state[3] = seen.at, current, seen.previous
end

local function refund(limit, state, now, cost)
  local seen = see(limit, state, now)
  if seen.is_cut then return 0 end
  local credited = math.min(cost, seen.current)
  if credited > 0 then
    state[1], state[2], state[3] = seen.at, seen.current - credited, seen.previous
  end
  return credited
end

return { decide = decide, charge = charge, refund = refund }
