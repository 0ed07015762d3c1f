-- ARGV: cursor, most entries, most bytes. Returns {cursor, n, data} of trajectories after the cursor; at least one, if there is one.
local out, bytes, last = {}, 0, ARGV[1]
while #out < tonumber(ARGV[2]) and bytes < tonumber(ARGV[3]) do
  local entry = redis.call('XRANGE', TRAJECTORIES, '(' .. last, '+', 'COUNT', 1)[1]
  if not entry then break end
  last = entry[1]
  out[#out + 1] = {last, entry[2][2], entry[2][4]}
  bytes = bytes + #entry[2][4]
end
return out
