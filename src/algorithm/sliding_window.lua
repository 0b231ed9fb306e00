-- Twin of the two counters of sliding_window.rs: the instant at which both are past, and the two.
--
-- 2 Parameters: the cost, what may be in use after it, the limit, the most that is counted at all, the period, what the
--   counter before counts for (0 in proportion, 1 nothing, 2 in full), and 1 if denied requests count.
-- 3 State: at, before, current.

-- 4 decide
local function sliding_window(now, at, before, current, cost, bound, limit, most, period, oldest, count_denied)
  local start = now - now % period
  local passed = now - start
  local moved = false
  local held = at - 2 * period -- where the current counter starts
  if held < start - period then
    before, current = 0, 0
  elseif held < start then
    before, current = current, 0
  elseif held > start then
    -- The clock stepped back: it stands still, or from more than a period away the counters come along.
    passed = 0
    if held - start <= period then
      start = held
    else
      if now > start then start = start + period end
      before, current, moved = 0, before + current, true
      if current > most then current = most end
    end
  end
  local used = current
  if oldest == 1 then
    before = 0
  elseif oldest == 2 then
    used = used + before
  elseif passed == 0 then
    used = used + before
  else
    used = used + muldiv(before, period - passed, period)
  end

  local units = 0
  local ok = used + cost <= bound
  if ok then
    units = most - used
  elseif count_denied == 1 then
    units = limit - current
  end
  if units > cost then units = cost end
  if units <= 0 then
    if moved and cost > 0 then return ok, start + 2 * period, before, current end
    return ok
  end
  current = current + units
  if current > most then current = most end
  return ok, start + 2 * period, before, current
end
