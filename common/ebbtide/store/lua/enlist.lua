-- ARGV: term, run. Puts a run that is about to be made behind all others on the fleet's list. Returns 1, or 0 if it is there.
local bad = deposed(ARGV[1])
if bad then return bad end
local last = redis.call('ZRANGE', INDEX, -1, -1, 'WITHSCORES')
return redis.call('ZADD', INDEX, 'NX', tonumber(last[2] or 0) + 1, ARGV[2])
