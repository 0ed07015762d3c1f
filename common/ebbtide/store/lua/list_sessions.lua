-- ARGV: term, role, fence, owner ('' for any), number of the session before, most sessions to look at. Returns {number, row} of each
-- that is the owner's, in the order of opening, and at the end the number of the last one looked at, 0 if there is none after it.
local bad = barred(ARGV[1], ARGV[2], ARGV[3]); if bad then return bad end
local listed = ARGV[4] == '' and SESSIONS or OWNED .. ARGV[4]
local found = redis.call('ZRANGEBYSCORE', listed, '(' .. ARGV[5], '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[6])
local out = {}
for i = 1, #found, 2 do
  local row = session_row(found[i], ARGV[4])
  if row then
    row[9] = ''
    out[#out + 1] = {tonumber(found[i + 1]), row}
  end
end
out[#out + 1] = #found == 2 * ARGV[6] and tonumber(found[#found]) or 0
return out
