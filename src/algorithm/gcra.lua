-- Twin of gcra.rs: one instant, whole microseconds `at` and a numerator `n` over `l`.
--
-- 2 Parameters: the charge's span, how far ahead the instant may be after it, and how far at all: whole microseconds in
--   `cost`, `bound` and `ceiling`, numerators in `cost_n`, `bound_n` and `ceiling_n`. With l = 1 they are 0, and `n` is not looked at.
-- 3 State: at, n.

-- 4 decide: whether the quota allows it; then the state to write, if one is to be written.
local function gcra(now, at, n, _, cost, bound, ceiling, l, cost_n, bound_n, ceiling_n)
  local us = at - now
  local num, clamped = n or 0, false
  if num >= l then num = l - 1 end
  if us < 0 then
    us, num = 0, 0
  elseif us > ceiling or (us == ceiling and num > ceiling_n) then
    us, num, clamped = ceiling, ceiling_n, true
  end
  local after, after_n = us + cost, num + cost_n
  if after_n >= l then
    after, after_n = after + 1, after_n - l
  end
  if after > bound or (after == bound and after_n > bound_n) then
    if clamped then return false, now + us, num end
    return false
  end
  if after > ceiling or (after == ceiling and after_n > ceiling_n) then
    after, after_n = ceiling, ceiling_n
  end
  if after == us and after_n == num and (not clamped or cost == 0 and cost_n == 0) then return true end
  return true, now + after, after_n
end
