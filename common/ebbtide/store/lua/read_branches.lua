-- ARGV: term, role, fence, session. Returns "ROLLOUTS TRAJECTORY" of the branches of a session that waits for its verdict, else nothing.
local bad = barred(ARGV[1], ARGV[2], ARGV[3]); if bad then return bad end
if redis.call('HGET', SESSION .. ARGV[4], 'state') ~= 'verifying' then return {} end
return redis.call('HVALS', BRANCHES .. ARGV[4])
