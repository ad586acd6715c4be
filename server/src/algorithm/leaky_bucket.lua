-- Twin of leaky_bucket.rs: the same names, the same order, the same integers.
-- The state is the token bucket's, which has tag 1.

local token_bucket = algorithms[1]

local function decide(limit, state, now, at_least, at_most)
  local decision = token_bucket.decide(limit, state, now, at_least, at_most)
  if decision.denied then
    return decision
  end
  local queued, step = token_bucket.missing(limit, state, now)
  decision.wait = level.flow(limit, queued, step)
  return decision
end

return { decide = decide, charge = token_bucket.charge, refund = token_bucket.refund }
