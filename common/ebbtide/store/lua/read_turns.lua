-- ARGV: term, role, fence, session, owner ('' for any), number of the turn before, most bytes. Returns {its row, 1 if there are more,
-- number, age in ms and packed turn of each}.
local AT_ONCE = 8
local bad = barred(ARGV[1], ARGV[2], ARGV[3]); if bad then return bad end
local row = session_row(ARGV[4], ARGV[5])
if not row then return refuse('SESSION') end
local out, bytes, number = {row, 0}, 0, tonumber(ARGV[6])
local page = redis.call('LRANGE', TURNS .. ARGV[4], number, number + AT_ONCE - 1)
while page[1] do
  for _, entry in ipairs(page) do
    local at, turn = string.match(entry, '^(%-?%d+) (.*)$')
    if #out > 2 and bytes + #turn > tonumber(ARGV[7]) then
      out[2] = 1
      return out
    end
    number, bytes = number + 1, bytes + #turn
    out[#out + 1] = {number, age() - at, turn}
  end
  page = redis.call('LRANGE', TURNS .. ARGV[4], number, number + AT_ONCE - 1)
end
return out
