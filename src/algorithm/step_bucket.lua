-- Twin of step_bucket.rs: the tick at which the bucket is full again, and the tokens that this tick will have to spare.
--
-- 2 Parameters: the cost, what may be missing after it, what may be missing at all, tokens per tick, the tick's length, and
--   1 if ticks lie at whole multiples since the epoch.
-- 3 State: at, n.

-- Returns the tokens that are missing, the next tick, and whether the clock stepped back.
local function step_level(now, at, n, most, tokens, tick, epoch)
  local next_tick = now + tick
  if epoch == 1 then next_tick = next_tick - now % tick end
  if at <= now then return 0, next_tick, false end
  local ticks = math.ceil((at - now) / tick)
  local missing = ticks * tokens - n
  if missing < 0 then missing = 0 end
  if missing > most then return most, next_tick, true end
  return missing, at - (ticks - 1) * tick, false
end

-- Returns the state with this number of missing tokens; -1 if there is none.
local function step_store(missing, next_tick, tokens, tick)
  if missing == 0 or tokens == 0 then return -1, 0 end
  local ticks = math.ceil(missing / tokens)
  return next_tick + (ticks - 1) * tick, ticks * tokens - missing
end

-- 4 decide
local function step_bucket(now, at, n, _, cost, bound, most, tokens, tick, epoch)
  local missing, next_tick, clamped = step_level(now, at, n or 0, most, tokens, tick, epoch)
  local after = missing + cost
  if after > bound or cost == 0 then
    local ok = after <= bound
    if clamped and cost > 0 then return ok, step_store(missing, next_tick, tokens, tick) end
    return ok
  end
  if after > most then after = most end
  return true, step_store(after, next_tick, tokens, tick)
end
