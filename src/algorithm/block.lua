-- Twin of block.rs: strikes, and blocks that are remembered.
--
-- 2 Parameters: the cost, 1 if it is forced, strikes, their period, the length, the factor, the longest, the memory, and 1 if
--   denied requests count.
-- 3 State: at, n (the span), m (strikes, 4,096 if the memory ends after the window, 8,192 for each block remembered).

-- The phase (0 quiet, 1 counting until `a` and at `b` strikes, 2 closed until `a`, for `b` in all), the blocks that are
-- remembered and until when, and whether the clock stepped back.
local function block_view(now, at, n, m, limit, period, memory)
  if at <= now then return 0, 0, 0, 0, 0, false end
  local strikes = m % 4096
  local rest = (m - strikes) / 4096
  local later = rest % 2
  local level = (rest - later) / 2
  if strikes == 0 then
    local ends, moved = math.max(at - memory, 0), false
    if ends > now + n then ends, moved = now + n, true end
    if ends > now then return 2, ends, n, level, ends + memory, moved end
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
  if strikes > limit - 1 then strikes = limit - 1 end
  if ends > now and strikes > 0 then return 1, ends, strikes, level, forget, moved end
  return 0, 0, 0, level, forget, moved
end

-- The state; -1 if there is none.
local function block_stored(now, phase, a, b, level, forget, memory)
  if phase == 2 then return a + memory, b, level * 8192 end
  local remembered = level > 0 and forget > now
  if phase == 0 then
    if remembered then return forget, 0, level * 8192 end
    return -1, 0, 0
  end
  if not remembered then return a, 0, b end
  if forget > a then return forget, forget - a, level * 8192 + 4096 + b end
  return a, a - forget, level * 8192 + b
end

-- The length of a block when `level` blocks are remembered.
local function block_length(level, length, factor, longest)
  for _ = 1, level do
    length = math.min(length * factor, longest)
    if factor == 1 or length == longest then break end
  end
  return length
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
local function block(now, at, n, m, cost, force, limit, period, length, factor, longest, memory, count_denied)
  local phase, a, b, level, forget, moved = block_view(now, at, n or 0, m or 0, limit, period, memory)
  local function kept(ok)
    if moved and cost > 0 then return ok, block_stored(now, phase, a, b, level, forget, memory) end
    return ok
  end
  if phase == 2 then
    if count_denied ~= 1 or cost == 0 then return kept(false) end
    local anew = block_length(math.max(level - 1, 0), length, factor, longest)
    if now + anew > a then a, b = now + anew, anew end
    return false, block_stored(now, 2, a, b, level, forget, memory)
  end
  if cost == 0 then return kept(true) end
  local ends, strikes = now + period, 0
  if phase == 1 then ends, strikes = a, b end
  local room = limit - strikes
  local denied = cost > room and force ~= 1
  if denied and count_denied ~= 1 then return kept(false) end
  if cost > room then cost = room end
  phase, a, b, level = block_struck(now, ends, strikes + cost, level, forget, limit, length, factor, longest, memory)
  local ok = not denied and not (force == 1 and phase == 2)
  return ok, block_stored(now, phase, a, b, level, forget, memory)
end

-- The state of another block, whose memory, strikes and period are these, as one of this: first whether an instant was moved,
-- or this closed it.
local function block_adopt(now, at, n, m, from, limit, period, length, factor, longest, memory)
  local phase, a, b, level, forget, moved = block_view(now, at, n, m, from.limit, from.period, from.memory)
  if level > 0 and phase ~= 2 and forget > now + memory then forget, moved = now + memory, true end
  if memory == 0 then level = 0 end
  if phase == 1 then
    moved = moved or a > now + period or b >= limit
    local strikes, ends = math.min(b, limit), math.min(a, now + period)
    phase, a, b, level = block_struck(now, ends, strikes, level, forget, limit, length, factor, longest, memory)
  end
  return moved, block_stored(now, phase, a, b, level, forget, memory)
end
