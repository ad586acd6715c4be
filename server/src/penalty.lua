-- Twin of penalty.rs: the same names, the same order, the same integers.
-- penalty: { strikes, window, base, cap }; record: { count, forgotten, blocked_until }; times in microseconds

local MOST_STRIKES = 4294967295

local function block(penalty, count)
  local over = math.max(count - penalty.strikes, 0)
  if over == 0 then return 0 end
  return math.min(penalty.base * 2 ^ math.min(over, 32), penalty.cap)
end

local function strike(penalty, record, now, more)
  local before, till = 0, 0
  if now < record.forgotten then
    before, till = record.count, record.forgotten
  end
  local count = math.min(before + more, MOST_STRIKES)
  local span = block(penalty, count)
  local life = math.max(penalty.window, 2 * span)
  local ends = 0
  if span > 0 then ends = now + span end
  return {
    count = count,
    forgotten = math.max(till, now + life),
    blocked_until = math.max(record.blocked_until, ends),
  }
end

return strike
