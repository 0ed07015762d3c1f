-- ARGV: term, the store's incarnation in which all runs are settled. Keeps its name.
local bad = deposed(ARGV[1]); if bad then return bad end
redis.call('SET', LIFE, ARGV[2])
return 1
