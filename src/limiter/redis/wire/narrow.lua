-- floor(a * b / c), where a * b is below 2^53.
local function muldiv(a, b, c)
  return math.floor(a * b / c)
end

-- The same, rounded up.
local function muldiv_up(a, b, c)
  return math.ceil(a * b / c)
end
