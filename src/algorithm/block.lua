-- Twin of block.rs: strikes, and blocks that are remembered.
--
-- 2 Parameters: the cost, 1 if it is forced, strikes, their period, the length, the factor, the longest, the memory, and 1 if
--   denied requests count, and how long a key is closed by hand or 0.
-- 3 State: at, n (the span), m (strikes, 4,096 for the flag, 8,192 for each block remembered).

-- The length of a block when `level` blocks are remembered.
local function block_length(level, length, factor, longest)
  for _ = 1, level do
    length = math.min(length * factor, longest)
    if factor == 1 or length == longest then break end
  end
  return length
end

-- The phase (0 quiet, 1 counting until `a` and at `b` strikes, 2 closed until `a`, for `b` in all), the blocks that are
-- remembered and until when, and whether the clock stepped back. If closed, then the end of the window that closed it, and
-- the strikes in that: 0 if no refund opens it.
local function block_view(now, at, n, m, limit, period, length, factor, longest, memory)
  if at <= now then return 0, 0, 0, 0, 0, false end
  local strikes = m % 4096
  local rest = (m - strikes) / 4096
  local later = rest % 2
  local level = (rest - later) / 2
  if strikes == 0 or strikes >= limit then
    local ends, moved, window = math.max(at - memory, 0), false, 0
    if strikes > 0 then
      window = later == 1 and ends + n or math.max(ends - n, 0)
      n = block_length(math.max(level - 1, 0), length, factor, longest)
    end
    if ends > now + n then ends, moved = now + n, true end
    if ends > now then return 2, ends, n, level, ends + memory, moved, window, strikes end
    return 0, 0, 0, level, ends + memory, moved
  end
  local ends, forget, moved = at, 0, false
  if level > 0 then
    forget = math.max(at - n, 0)
    if later == 1 then ends, forget = forget, at end
  end
  if ends > now + period then ends, moved = now + period, true end
  if forget > now + memory then forget, moved = now + memory, true end
  if forget <= now then level = 0 end
  if ends > now then return 1, ends, strikes, level, forget, moved end
  return 0, 0, 0, level, forget, moved
end

-- The state; -1 if there is none.
local function block_stored(now, phase, a, b, level, forget, memory, window, strikes)
  if phase == 2 then
    local span = strikes and strikes > 0 and strikes < 4096 and math.abs(window - a)
    if not span or span > 31622400000000 then return a + memory, b, level * 8192 end
    return a + memory, span, level * 8192 + (window > a and 4096 or 0) + strikes
  end
  local remembered = level > 0 and forget > now
  if phase == 0 then
    if remembered then return forget, 0, level * 8192 end
    return -1, 0, 0
  end
  if not remembered then return a, 0, b end
  if forget > a then return forget, forget - a, level * 8192 + 4096 + b end
  return a, a - forget, level * 8192 + b
end

-- With this number of strikes in the window that ends at `ends`: the phase and the blocks that are remembered.
local function block_struck(now, ends, strikes, level, forget, limit, length, factor, longest, memory)
  if strikes < limit then return 1, ends, strikes, level end
  if forget <= now then level = 0 end
  local lasts = block_length(level, length, factor, longest)
  level = memory > 0 and math.min(level + 1, 63) or 0
  return 2, now + lasts, lasts, level
end

-- 4 decide
local function block(now, at, n, m, cost, force, limit, period, length, factor, longest, memory, count_denied, by_hand)
  local phase, a, b, level, forget, moved, window, strikes =
    block_view(now, at, n or 0, m or 0, limit, period, length, factor, longest, memory)
  local function stored(ok)
    return ok, block_stored(now, phase, a, b, level, forget, memory, window, strikes)
  end
  if cost == 0 or phase == 2 and count_denied ~= 1 and (force ~= 1 or strikes == 0) then
    if moved and cost > 0 then return stored(false) end
    return phase ~= 2
  end
  if phase == 2 then
    local anew = count_denied == 1 and block_length(math.max(level - 1, 0), length, factor, longest) or 0
    if by_hand > 0 then anew = by_hand end
    if now + anew > a then a, b = now + anew, anew end
    strikes = strikes > 0 and window > now and by_hand == 0 and strikes + cost or 0
    return stored(false)
  end
  window, strikes = now + period, 0
  if phase == 1 then window, strikes = a, b end
  local denied = cost > limit - strikes and force ~= 1
  if denied and count_denied ~= 1 then
    if moved then return stored(false) end
    return false
  end
  strikes = strikes + cost
  phase, a, b, level = block_struck(now, window, strikes, level, forget, limit, length, factor, longest, memory)
  if phase == 2 and by_hand > 0 then a, b, strikes = now + by_hand, by_hand, 0 end
  return stored(not denied and not (force == 1 and phase == 2))
end

-- The state of another block, whose memory, strikes, period and lengths these are, as one of this: first whether an instant
-- was moved, or this closed it. No refund opens what another block closed.
local function block_adopt(now, at, n, m, from, limit, period, length, factor, longest, memory)
  local phase, a, b, level, forget, moved =
    block_view(now, at, n, m, from.limit, from.period, from.length, from.factor, from.longest, from.memory)
  if level > 0 and phase ~= 2 and forget > now + memory then forget, moved = now + memory, true end
  if memory == 0 then level = 0 end
  if phase == 1 then
    moved = moved or a > now + period or b >= limit
    phase, a, b, level =
      block_struck(now, math.min(a, now + period), b, level, forget, limit, length, factor, longest, memory)
  end
  return moved, block_stored(now, phase, a, b, level, forget, memory)
end
