-- ARGV: term. A starting coordinator takes over a live run. Returns 1 if the run is live.
if redis.call('EXISTS', FENCE) == 0 then return 0 end
redis.call('HSET', FENCE, 'term', ARGV[1])
return 1
