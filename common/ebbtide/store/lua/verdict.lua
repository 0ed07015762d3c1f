-- ARGV: term, role, fence, session, reward ('' for none), drop reason ('' if it becomes trajectories), then number of rollouts that it
-- counts for, packed trajectory of each. Ends a session that waits for its verdict, once. Returns its row.
local bad = barred(ARGV[1], ARGV[2], ARGV[3]); if bad then return bad end
local id = ARGV[4]
local row = session_row(id, '')
if not row then return refuse('SESSION') end
if row[4] ~= 'verifying' then return row end
end_session(id, ARGV[6] == '' and 'completed' or 'dropped', ARGV[6], {})
if ARGV[5] ~= '' then redis.call('HSET', SESSION .. id, 'reward', ARGV[5]) end
for at = 7, #ARGV, 2 do add_trajectory(ARGV[at], ARGV[at + 1]) end
settle()
return session_row(id, '')
