-- Twin of fixed_window.rs: the window's end, and the count.
--
-- 2 Parameters: the cost, what may be counted after it, the limit, the most that is counted at all, the period, 1 if
--   windows begin at whole multiples of it since the epoch, and 1 if denied requests count. Windows of a calendar have
--   the period 0. Then follow the start and the end of the window that now is in, and the end of the next one.
-- 3 State: at, n. A state of a calendar has a third number, the start of its window.

-- 4 decide
local function fixed_window(
  now, at, n, m, cost, bound, limit, most, period, epoch, count_denied, start, open, following
)
  local count, moved, ends = 0, false, at
  if at > now and at - now <= 2 * period then
    count = n
  else
    if period > 0 then
      start = now
      if epoch == 1 then start = now - now % period end
      open = start + period
      following = open + period
    end
    if at > now and at <= following then
      count = n
    else
      if at > now then count, moved = n, true end
      ends, m = open, start
      if moved and now > start then ends, m = following, open end -- at least a whole window away
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
  return ok, ends, after, m
end
