-- ARGV: cursor. Returns {cursor, session, verifier, data, then "ROLLOUTS TRAJECTORY" of its branches} of the first session after the
-- cursor that waits for its verdict; nothing if there is none. If the store forgot the cursor, the first of all.
local last = ARGV[1]
if forgotten(UNVERIFIED, last) then last = '0-0' end
local entry = redis.call('XRANGE', UNVERIFIED, '(' .. last, '+', 'COUNT', 1)[1]
if not entry then return {} end
local id = entry[2][2]
local r = redis.call('HMGET', SESSION .. id, 'verifier', 'data')
local out = {entry[1], id, r[1] or '', r[2] or ''}
local branches = redis.call('HGETALL', BRANCHES .. id)
for i = 2, #branches, 2 do out[#out + 1] = branches[i] end
return out
