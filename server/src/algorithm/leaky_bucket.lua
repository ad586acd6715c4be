-- Twin of leaky_bucket.rs: the same names, the same order, the same integers.
-- The state is the token bucket's, which has tag 1.

local token_bucket = algorithms[1]

local function decide(limit, state, now, at_least, at_most)
  local denied, granted, remaining, retry_after, reset_after, wait =
    token_bucket.decide(limit, state, now, at_least, at_most)
  if not denied then
    local queued, step = token_bucket.missing(limit, state, now)
    wait = level.flow(limit, queued, step)
  end
  return denied, granted, remaining, retry_after, reset_after, wait
end

return { decide = decide, charge = token_bucket.charge, refund = token_bucket.refund }
