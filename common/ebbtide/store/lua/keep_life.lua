-- ARGV: term, the store's life in which all runs were settled.
local bad = deposed(ARGV[1])
if bad then return bad end
redis.call('SET', LIFE, ARGV[2])
return 1
