-- The requests of a call, in their order.
local program, place, first, requests = ARGV[1], 1, 0, nil
local reply, answers = ARGV[2] .. pack('<d', now), nil
while place <= #program do
  local verb, count, width, from = unpack('<BI2I2', program, place)
  local is_lone, forms = verb == 0 and width == 1, {}
  local kind, layout, head, size, mode, a, b, c, d, e, f, g, h, i, j, _, after
  local decide, write
  if is_lone then
    kind, layout, head, size, mode, a, b, c, d, e, f, g, h, i, j, _, after = unpack(FORM, program, from)
    decide, write = twin(kind)
  end
  for _ = 1, count do
    local key, answer = KEYS[first + 1], nil
    if is_lone and (kind == 6 or kind == 7) then
      local list, newest, units, total = read_list(try, unpack, key, layout, head, size)
      if list then
        local _, told, writes, gone, cut, last, held, counted, joins, whole = decide(
          try, pack, unpack, now, key, list, newest, units, total, layout, size, a, b, c, d, e, f, g, h, i, j
        )
        if not writes or pcall(
          write, try, pack, unpack, now, longer, key, list, layout, head, size, j,
          gone, cut, last, held, counted, joins, whole
        ) then
          answer = told
        end
      end
    elseif is_lone then
      local found, at, n, m = read_pair(try, unpack, key, layout, head, size)
      if found then
        local _, to, p, q = decide(now, at, n, m, a, b, c, d, e, f, g, h, i)
        if not (to and write_pair(try, pack, now, longer, key, layout, head, at, to, p, q)) then answer = found end
      end
    elseif verb == 0 then
      answer, after = usual_set(
        try, pack, unpack, now, longer, read_pair, write_pair, twin, KEYS, FORM, first, program, from, width, forms
      )
    end
    if not answer then
      requests = requests
        or make_requests(try, pack, unpack, now, longer, twin, read_pair, write_pair, read_list, FORM, program)
      answer, after = requests(verb, first, width, from)
    end
    place, first = after, first + width
    if place > #program and count == 1 and not answers then return reply .. answer end
    answers = answers or {reply}
    answers[#answers + 1] = answer
  end
end
return answers and table.concat(answers) or reply
