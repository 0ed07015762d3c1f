-- ARGV: term, role, fence, session, owner, group, record, quota in bytes. Opens a session, unless it is here. Returns its row; see
-- session_row.
local bad = barred(ARGV[1], ARGV[2], ARGV[3]); if bad then return bad end
local id = ARGV[4]
local row = session_row(id, '')
if row then return row[2] == ARGV[5] and row or refuse('SESSION') end
if redis.call('ZSCORE', GONE, 's:' .. id) then return refuse('OVER') end
local bytes = #ARGV[7] + SESSION_BYTES
local full = beyond_quota(bytes, ARGV[8], ARGV[2]); if full then return full end
local number = redis.call('HINCRBY', RUN, 'sessions', 1)
redis.call('ZADD', SESSIONS, number, id)
redis.call('ZADD', OWNED .. ARGV[5], number, id)
redis.call('ZADD', IDLE, age(), id)
redis.call('HSET', SESSION .. id, 'owner', ARGV[5], 'group', ARGV[6], 'record', ARGV[7], 'state', 'open', 'reason', '', 'turns', 0,
  'opened', age(), 'held', bytes)
count('bytes', bytes)
count('sessions_opened', 1)
settle()
return session_row(id, '')
