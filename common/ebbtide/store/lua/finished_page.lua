-- ARGV: cursor, most entries, most bytes. Returns {cursor, req, attempts, reason, message, tokens} of finished rollouts after the cursor,
-- or of all, if the store forgot the cursor.
local out, bytes = {}, 0
local entries = redis.call('XRANGE', FINISHED, '(' .. ARGV[1], '+', 'COUNT', ARGV[2])
if not entries[1] and forgotten(FINISHED, ARGV[1]) then entries = redis.call('XRANGE', FINISHED, '-', '+', 'COUNT', ARGV[2]) end
for _, entry in ipairs(entries) do
  local id = entry[2][2]
  local r = redis.call('HMGET', ROLLOUT .. id, 'req', 'attempts', 'reason', 'message')
  local tokens = redis.call('GET', TOKENS .. id) or ''
  out[#out + 1] = {entry[1], r[1], r[2], r[3], r[4], tokens}
  bytes = bytes + #tokens
  if bytes >= tonumber(ARGV[3]) then break end
end
return out
