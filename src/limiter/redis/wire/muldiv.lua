-- Returns floor(a * b / c), and the rest. They are below 2^53, and `b` and `c` below
-- 2^51. A quotient above 2^53 is rounded.
local function muldiv(a, b, c)
  local product, quotient, bit = a * b, 0, 2 ^ 52
  if product < 9007199254740992 then
    quotient = math.floor(product / c)
    return quotient, product - quotient * c
  end
  local rest = 0
  repeat -- long division, one bit of `a` after the other
    rest = rest * 2
    if a >= bit then a, rest = a - bit, rest + b end
    local times = math.floor(rest / c)
    quotient, rest, bit = quotient * 2 + times, rest - times * c, bit / 2
  until bit < 1
  return quotient, rest
end
