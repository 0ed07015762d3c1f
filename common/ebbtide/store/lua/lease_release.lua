-- ARGV: term, role, fence. Ends a lease. Idempotent: a former fence has nothing to release.
local bad = barred(ARGV[1]); if bad then return bad end
if redis.call('HGET', FENCE, 'lease:' .. ARGV[2]) ~= ARGV[3] then return 0 end
if of_gateway(ARGV[2]) then drop_gateway(string.sub(ARGV[2], 9)) end
redis.call('DEL', CLAIM .. ARGV[2])
redis.call('HDEL', FENCE, 'lease:' .. ARGV[2], 'holder:' .. ARGV[2])
return 1
