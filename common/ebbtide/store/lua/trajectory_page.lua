-- ARGV: cursor, most entries, most bytes, time in ms before which all are durable, or -1. Returns {cursor, n, data} of durable
-- trajectories after the cursor; at least one, if there is one. The store may still forget a younger one, which would then come again under another cursor and be trained
-- on twice. One from the future was written before the clock was set back, or by another server: it counts as old. If the store forgot
-- the cursor, they come from the first one on.
local out, bytes, last, before = {}, 0, ARGV[1], tonumber(ARGV[4])
while #out < tonumber(ARGV[2]) and bytes < tonumber(ARGV[3]) do
  local entry = redis.call('XRANGE', TRAJECTORIES, '(' .. last, '+', 'COUNT', 1)[1]
  if not entry and #out == 0 and forgotten(TRAJECTORIES, last) then entry = redis.call('XRANGE', TRAJECTORIES, '-', '+', 'COUNT', 1)[1] end
  local at = entry and tonumber(entry[2][6])
  if not entry or (before >= 0 and at >= before and at - now_ms() <= now_ms() - before) then break end
  last = entry[1]
  out[#out + 1] = {last, entry[2][2], entry[2][4]}
  bytes = bytes + #entry[2][4]
end
return out
