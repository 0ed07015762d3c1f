-- ARGV: rollout, offset in tokens, most tokens. Returns {state, reason or '', tokens stored, bytes from offset, message or ''}, or
-- false if it is gone.
local r = redis.call('HMGET', ROLLOUT .. ARGV[1], 'state', 'reason', 'message')
if not r[1] then return false end
local from = ARGV[2] * 12
local bytes = redis.call('GETRANGE', TOKENS .. ARGV[1], from, from + ARGV[3] * 12 - 1)
return {r[1], r[2] or '', redis.call('STRLEN', TOKENS .. ARGV[1]) / 12, bytes, r[3] or ''}
