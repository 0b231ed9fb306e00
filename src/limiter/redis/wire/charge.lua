-- Takes, peeks and refunds.
--
-- The functions share no local variable with the script around them. Redis creates them anew with
-- each call: a function costs about 900 instructions then, and each shared variable 400. So they are
-- given all that they use, one by one: first what every function uses, then what is known of the
-- request, then the fields of the form. A table of the first and one of the last make a lone check
-- of a log 11 % more expensive and one of held units 16 %. The fields as `...`, with `redis.pcall` and
-- `struct.unpack` looked up where they are used, make a lone check 4 to 7 % more expensive, and one of
-- 64 in a call 5 to 8 %. (Instructions within EVALSHA, by callgrind.)

-- The form of a charge: kind, layout and head of the value, its size, mode, ten numbers, and more
-- (see wire/mod.rs).
local FORM = '<BBc0Bc0BBddddddddddI2c0'

-- Decides a charge and, by calling itself, those behind it in its request. Only then it is known
-- whether the request is allowed, and the charge is written.
--
-- `denied` has a 1 for each charge before this one that its own quota denied, and a 0 for each other
-- one. `decide` and `more` are what `twin` returns, if that was called already. Then come the
-- fields of the form.
--
-- Returns the answer and whether the request is allowed; if it failed, nothing and the error.
local function charge(
  charge, twin, try, pack, unpack, now, longer, FORM,
  operation, number, last, denied, allowed, decide, more,
  kind, layout, head, size, mode, a, b, c, d, e, f, g, h, i, j, extra, place
)
  local key, is_list = KEYS[number], kind == 6 or kind == 7
  if not decide then decide, more = twin(kind) end
  if kind == 11 and (now < h or now >= i) then return nil, '\10' end -- not in the window that the process named

  -- What is answered, and the state. Numbers that a layout lacks are not looked at. Of a list,
  -- `found` has its first elements, `at` and `n` are of its newest entry, and `m` is the units of
  -- all.
  local found, at, n, m
  local ok, told, writes, to, p, q, _
  local moved, before, after, line, without, rows, row, others, earliest, latest
  if kind == 10 then
    local value = try('GET', key)
    if type(value) == 'table' then
      return nil, string.find(value.err, 'WRONGTYPE', 1, true) and '\3' or value
    end
    ok, told, moved, before, after, line, without, rows, row, others, earliest, latest =
      decide(pack, unpack, now, value, head, operation, a, b, c, d, e, f, g, i, extra)
    if ok == nil then return nil, told and '\8' .. pack('<I2', #denied) .. told or '\3' end
  elseif is_list then
    local list = try('LRANGE', key, '0', '2')
    local length = #list
    if length > 1 and list[1] == head and #list[2] == size and #list[length] == size then
      local newest = length > 2 and try('LINDEX', key, '-1') or list[2]
      if #newest == size then at, n, m = unpack(layout, newest) end
      if at and at >= 0 and at < 9007199254740992 and n >= 0 and m >= n then found = list end
    elseif length == 0 and not list.err then
      found, m = list, 0
    end
  else
    local value = try('GET', key)
    if not value then
      found, at, n, m = '\0', 0, 0, 0
    elseif #value == size then
      local own
      own, at, n, m = unpack(layout, value)
      if own == head and at >= 0 and at < 9007199254740992 and n >= 0 and n < 9007199254740992 then
        found = '\1' .. string.sub(value, #head + 1)
      end
    end
  end
  local form, other, whole, done
  if kind ~= 10 and (not found or operation == 3) then form = {kind, layout, head, size, mode, a, b, c, d, e, f, g, h, i, j, extra} end
  if form and not found then
    done, other, found, at, n, m = pcall(twin(0), try, pack, unpack, now, longer, twin, key, form)
    if not done then return nil, other end
    whole = other.whole
  end

  local gone, cut, newest, units, counted, joins, gathered
  if kind == 10 then
    writes = true
  elseif operation == 3 then
    done, to, p, q = pcall(twin(0), try, pack, unpack, now, longer, twin, key, form, found, at, n, m, other)
    if not done then return nil, to end
    told, writes = not to and p and '\6' or '\5', to
  elseif is_list then
    ok, told, writes, gone, cut, newest, units, counted, joins, gathered = decide(
      try, pack, unpack, now, not whole and key, found, at, n, m, layout, size, a, b, c, d, e, f, g, h, i, j
    )
    writes = writes or other and other.ahead and a > 0
  else
    told = found
    if mode > 2 then
      local from, upto = unpack('<I2I2', extra, 2)
      local is_hit = from == 0 or string.find(string.sub(denied, from, upto), '1', 1, true)
      -- If no partner was refused, the charge only looks. A closed block counts it if it counts denied
      -- requests.
      if kind == 8 and more(now, at, n, m, c, d, e, f, g, h) == 2 then is_hit = i == 1 end
      if not is_hit then a = 0 end
    end
    ok, to, p, q = decide(now, at, n, m, a, b, c, d, e, f, g, h, i, j)
    if other and other.ahead and not to and (a > 0 or kind == 2 and e > 0) then
      -- It lies further ahead than this quota can put it, and would stay there.
      to, p, q = found ~= '\0' and at or -1, n, m
    end
    writes = to
  end

  if other and other.over then writes = nil end

  local rest
  if operation < 3 and not ok and (mode == 1 or mode > 3) then allowed = false end
  if number < last then
    rest, allowed = charge(
      charge, twin, try, pack, unpack, now, longer, FORM,
      operation, number + 1, last, denied .. (ok and '0' or '1'), allowed, nil, nil, unpack(FORM, ARGV[1], place)
    )
    if not rest then return nil, allowed end
  end
  if is_list and ok and not allowed then
    -- How it stands with nothing taken.
    _, told = decide(
      try, pack, unpack, now, not whole and key, found, at, n, m, layout, size, 0, 2 ^ 62, c, d, e, f, g, h, i, j
    )
  end
  if kind == 10 then
    -- A refused charge still says what its holder had before.
    local takes = allowed and ok
    if operation ~= 2 and (takes and after ~= before or moved) then
      local failed = more(
        try, pack, now, longer, key, head, d, e, f, g, h, i, takes and after or before,
        takes and without or line, rows, row, others, earliest, latest
      )
      if failed then return nil, failed end
    end
    return rest and told .. rest or told, allowed
  end
  -- A refused set writes only what counts refusals: denied requests, and strikes of a block.
  if writes and operation ~= 2 and (allowed or mode == 1 and not ok or mode == 5) then
    local failed
    if is_list then
      if other and not whole then -- another quota's entries, which stay where they are
        done = try('LSET', key, '0', head)
        failed = done.err and done
      end
      if not failed then
        _, failed = pcall(
          more, try, pack, unpack, now, longer, key, found, layout, head, size, j,
          gone, cut, newest, units, counted, joins, gathered or whole
        )
      end
    elseif to < 0 then
      done = try('DEL', key)
      failed = type(done) == 'table' and done
    elseif to == at and at > 0 and not other then
      done = try('SET', key, pack(layout, head, to, p, q), 'KEEPTTL') -- half as dear as setting the time again
      failed = done.err and done
    else
      local left = to - now
      if left < 0 then left = 0 end -- a refund can leave a state that is over
      done = try('PSETEX', key, (left - left % 1000) / 1000 + longer, pack(layout, head, to, p, q))
      failed = done.err and done
    end
    if failed then return nil, failed end
  end
  return rest and told .. rest or told, allowed
end
