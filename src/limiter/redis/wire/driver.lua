-- The requests of a call, in their order.
local program, place, first = ARGV[1], 9, 0
local reply, answers = pack('<c8d', program, now), nil
while place <= #program do
  local operation, count, width, length, from = unpack('<BI2I2I4', program, place)
  local kind, layout, head, size, mode, a, b, c, d, e, f, g, h, i, j, extra, after
  local decide, more
  if operation < 4 then
    kind, layout, head, size, mode, a, b, c, d, e, f, g, h, i, j, extra, after = unpack(FORM, program, from)
    decide, more = twin(kind)
  end
  place = from + length
  for _ = 1, count do
    local answer, failed
    if operation < 4 then
      answer, failed = charge(
        charge, twin, try, pack, unpack, now, longer, FORM,
        operation, first + 1, first + width, '', true, decide, more,
        kind, layout, head, size, mode, a, b, c, d, e, f, g, h, i, j, extra, after
      )
    elseif operation == 4 then
      failed = try('DEL', KEYS[first + 1])
      answer = type(failed) ~= 'table' and '\5'
    else
      answer, failed = twin(12)(try, pack, unpack, now, longer, KEYS[first + 1])
    end
    if not answer then
      answer = failed
      if failed ~= '\3' and failed ~= '\10' and not (type(failed) == 'string' and string.byte(failed) == 8) then
        local words = string.sub(type(failed) == 'table' and failed.err or tostring(failed), 1, 1000)
        answer = pack('<BI2c0', 4, #words, words)
      end
    end
    first = first + width
    if place > #program and count == 1 and not answers then return reply .. answer end
    answers = answers or {reply}
    answers[#answers + 1] = answer
  end
end
return answers and table.concat(answers) or reply
