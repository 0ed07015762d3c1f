-- ARGV: cursor, most entries. Returns {cursor, fields} of events after the cursor, facts and chatter in their common order.
local facts = redis.call('XRANGE', EVENTS, '(' .. ARGV[1], '+', 'COUNT', ARGV[2])
local chatter = redis.call('XRANGE', CHATTER, '(' .. ARGV[1], '+', 'COUNT', ARGV[2])
local function number(entry) return entry and tonumber(string.match(entry[1], '^%d+')) or math.huge end
local out, f, c = {}, 1, 1
while #out < tonumber(ARGV[2]) and (facts[f] or chatter[c]) do
  if number(facts[f]) < number(chatter[c]) then
    out[#out + 1] = facts[f]
    f = f + 1
  else
    out[#out + 1] = chatter[c]
    c = c + 1
  end
end
return out
