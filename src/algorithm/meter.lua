-- Twin of meter.rs: until when the count is kept, and the count.
--
-- 2 Parameters: the cost, what may be counted after it, the most that is counted at all, and the retention.
-- 3 State: at, n.

-- 4 decide
local function meter(now, at, n, _, cost, bound, limit, retention)
  local count, moved = 0, false
  if at > now then
    count, moved = n, at > now + retention
    if moved then at = now + retention end
  end
  local after = count + cost
  local ok = after <= bound
  if not ok then after = count end
  local most = limit
  if count > most then most = count end
  if after > most then after = most end
  if after > count then return ok, now + retention, after end
  if moved and cost > 0 then return ok, at, count end
  return ok
end
