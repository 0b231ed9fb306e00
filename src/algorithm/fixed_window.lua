-- Twin of fixed_window.rs: the window's end, and the count.
--
-- 2 Parameters: the cost, what may be counted after it, the limit, the most that is counted at all, the period, 1 if
--   windows begin at whole multiples of it since the epoch, and 1 if denied requests count.
-- 3 State: at, n.

-- 4 decide
local function fixed_window(now, at, n, _, cost, bound, limit, most, period, epoch, count_denied)
  local count, moved, ends = 0, false, at
  if at > now and at - now <= 2 * period then
    count = n
  else
    local past = 0
    if epoch == 1 then past = now % period end
    ends = now - past + period
    if at > now then
      count, moved = n, true
      if past > 0 then ends = ends + period end -- at least a period away
    end
  end
  local after = count + cost
  local ok = after <= bound
  if not ok then
    if count_denied ~= 1 then
      after = count
    else
      if after > limit then after = limit end
      if after < count then after = count end
      moved = true
    end
  else
    local top = most
    if count > top then top = count end
    if after > top then after = top end
  end
  if after == count and (not moved or cost == 0) then return ok end
  if after == 0 then return ok, -1, 0 end
  return ok, ends, after
end
