-- ARGV: term. A coordinator that has begun to lead takes over a live run. Returns 1 if the run is live.
local bad = deposed(ARGV[1])
if bad then return bad end
if redis.call('EXISTS', FENCE) == 0 then return 0 end
redis.call('HSET', FENCE, 'term', ARGV[1])
return 1
