-- Shared by all scripts that write to a run. ARGV[1] is the coordinator's term.
-- Each script deletes first: a store that is out of memory allows deletions, and then also the writes after them.
-- Events from which drivers and trainers recover, a few per step or group: all are kept. Of other events, the newest are.
local FACTS = {
  status = true, version = true, step = true, group_dropped = true, evaluation = true, checkpoint = true, attached = true,
  round_opened = true, round_taken = true,
}
-- What a run keeps of its past grows with its quota, between bounds: spans, and as many ids that are over.
local LEAST_KEPT, MOST_KEPT, QUOTA_OF_ONE = 256, 16384, 16384
-- But ids are kept for so many seconds at least: repeats of calls whose answer was lost come within them.
local REMEMBERED_S = 10
-- Events that are no facts: at most one in so many of that, and so many bytes for each of that.
local KEPT_PER_CHATTER, CHATTER_BYTES = 8, 64
-- What one of them takes in memory; of events, besides their text, whose key is there twice.
local SPAN_BYTES, MARK_BYTES, EVENT_BYTES = 176, 112, 64
-- The same of a session, of a turn and of a turn's rollout, besides their records.
local SESSION_BYTES, TURN_BYTES, KEPT_BYTES = 512, 192, 224
-- The same of a key's account.
local ACCOUNT_BYTES = 768
-- Old entries that go at most for each new one: after an upgrade or a step's end, many are due at once.
local DROPPED_AT_ONCE = 4
-- Upper ends of a run's histogram buckets, counted as `NAME:le:END`: each counts values above the bucket before; the last is `inf`.
local BUCKETS = {
  detection = {0.1, 0.25, 0.5, 1, 1.5, 2, 2.5, 3, 5, 10},  -- seconds from a worker's last sign of life to its loss
  resume = {0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30},  -- seconds from back in the queue to the next attempt's first token
  attempts = {1, 2, 3, 5, 10},  -- per finished rollout
}

local function refuse(code, text)
  return redis.error_reply(code .. ' ' .. (text or ''))
end

-- The refusal for a writer with a former term or lease; nil for the present one.
local function barred(term, role, fence)
  local role = role or ''
  local have = redis.call('HMGET', FENCE, 'term', 'lease:' .. role)
  if not have[1] then
    local status = redis.call('HGET', RUN, 'status')
    if status then return refuse('ENDED', status) end
    return refuse('NORUN')
  end
  if have[1] ~= term then return refuse('TERM') end
  if role ~= '' and have[2] ~= fence then return refuse('LEASE') end
  return nil
end

-- The refusal for a coordinator that no longer leads the fleet, for scripts without a live run. A store that forgot the term gets it
-- again.
local function deposed(term)
  local have = redis.call('GET', TERM)
  if have and have ~= term then return refuse('TERM') end
  if not have then
    redis.call('SET', TERM, term)
    redis.call('SET', SCHEMA, NEWEST_SCHEMA, 'NX')
  end
  return nil
end

local change = {}  -- counter -> difference; written once, by settle()
local function count(name, by) change[name] = (change[name] or 0) + by end
local function settle()
  for name, by in pairs(change) do
    if by ~= 0 then redis.call('HINCRBY', COUNT, name, by) end
  end
  change = {}
end

local function observe(name, value)
  local own = 'inf'
  for _, upper in ipairs(BUCKETS[name]) do
    if value <= upper then own = upper; break end
  end
  count(name .. ':le:' .. own, 1)
end

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local age_ms  -- of the run; looked up once per script
local function age()
  age_ms = age_ms or string.format('%.0f', now_ms() - tonumber(redis.call('HGET', RUN, 'created')))
  return age_ms
end

-- The last entry number of a stream, in its two parts.
local function last_number(stream)
  local about = redis.pcall('XINFO', 'STREAM', stream)
  for i = 1, 31, 2 do  -- not #about: an empty stream has a nil in the middle
    if about[i] == 'last-generated-id' then return string.match(about[i + 1], '(%d+)-(%d+)') end
  end
  return '0', '0'
end

-- Whether a reader's cursor is newer than every entry: then the store forgot the entry. The clock may have been ahead when the cursor
-- was made, so later entries may have lower numbers. The reader may lack any of them, so it reads from the beginning.
local function forgotten(stream, cursor)
  local ms, n = string.match(cursor, '(%d+)-(%d+)')
  local last_ms, last_n = last_number(stream)
  ms, n, last_ms, last_n = tonumber(ms), tonumber(n), tonumber(last_ms), tonumber(last_n)
  return ms > last_ms or (ms == last_ms and n > last_n)
end

local function history_limit_of(quota)
  return math.max(LEAST_KEPT, math.min(MOST_KEPT, math.floor(tonumber(quota) / QUOTA_OF_ONE)))
end

-- How many spans, and how many ids that are over, a run keeps; and the lowest step that is not over. Looked up once per script.
local limit, first_step
local function history_limit()
  if not limit then
    local r = redis.call('HMGET', RUN, 'kept', 'first_step')
    limit, first_step = tonumber(r[1] or LEAST_KEPT), tonumber(r[2] or 0)
  end
  return limit
end

-- Notes that all steps below this one are over.
local function raise_first_step(step)
  history_limit()
  if step > first_step then
    redis.call('HSET', RUN, 'first_step', string.format('%.0f', step))
    first_step = step
  end
end

-- Bytes of what a run keeps of its past, which count towards its quota.
local function history()
  local r = redis.call('HMGET', RUN, 'facts', 'chatter')
  return (redis.call('XLEN', SPANS) + redis.call('XLEN', REQUEST_SPANS)) * SPAN_BYTES + redis.call('LLEN', DONE_ORDER) * MARK_BYTES
    + tonumber(r[1] or 0) + tonumber(r[2] or 0)
end

-- Of an event's kind, key, message, values and labels, at this place of a list.
local function event_bytes(list, at)
  local bytes = EVENT_BYTES + #list[at + 1]  -- the key is there twice
  for i = at, at + 4 do bytes = bytes + #list[i] end
  return bytes
end

-- Drops the oldest chatter beyond its bounds, and its keys. `bytes`: of all chatter.
local function trim_chatter(bytes)
  for _ = 1, DROPPED_AT_ONCE do
    if redis.call('XLEN', CHATTER) <= history_limit() / KEPT_PER_CHATTER and bytes <= history_limit() * CHATTER_BYTES then return end
    local oldest = redis.call('XRANGE', CHATTER, '-', '+', 'COUNT', 1)[1]
    if not oldest then return redis.call('HSET', RUN, 'chatter', 0) end  -- the count was off
    local f = oldest[2]
    redis.call('XDEL', CHATTER, oldest[1])
    redis.call('SREM', EVENT_KEYS, f[2] .. ':' .. f[4])
    local less = event_bytes({f[2], f[4], f[6], f[8], f[10]}, 1)
    local cut = math.min(bytes, less)
    if cut > 0 then bytes = redis.call('HINCRBY', RUN, 'chatter', -cut) end  -- -0 would be no integer
  end
end

local function emit(kind, key, message, values, labels)
  if key ~= '' and redis.call('SADD', EVENT_KEYS, kind .. ':' .. key) == 0 then return false end
  local id = redis.call('HINCRBY', RUN, 'events', 1) .. '-0'  -- one count orders the events of both streams
  local fact, bytes = FACTS[kind], event_bytes({kind, key, message, values, labels}, 1)
  redis.call('XADD', fact and EVENTS or CHATTER, id, 'k', kind, 'key', key, 'm', message, 'v', values, 'l', labels, 'at', age())
  local all = redis.call('HINCRBY', RUN, fact and 'facts' or 'chatter', bytes)
  if not fact then trim_chatter(all) end
  return true
end

-- Counts a rollout as ended: trained if there is no reason, else dropped. Evaluation and requests are counted apart.
local function close(kind, reason)
  if kind == 'request' then return end  -- counted as it finished
  if kind ~= 'train' then count('eval_completed', 1)
  elseif reason == '' then count('trained', 1)
  else count('dropped', 1); count('dropped:' .. reason, 1) end
end

-- Tokens that a rollout made. Of a scored one, what is stored are its scores, which come at once with the one token behind the prompt.
-- `scores`: bytes that they may take; nil or '0': it is not scored.
local function made_of(id, scores)
  local stored = redis.call('STRLEN', TOKENS .. id) / 12
  return tonumber(scores or 0) > 0 and math.min(stored, 1) or stored
end

-- The timeline's entry of a running attempt that ends now. Read it before the rollout's data is deleted, log it after.
local function span(id)
  local r = redis.call('HMGET', ROLLOUT .. id, 'attempt', 'worker', 'from', 'begin', 'kind', 'origin', 'step', 'scores')
  local first, last, versions = tonumber(r[3]), made_of(id, r[8]), ''
  if last > first then
    versions = redis.call('GETRANGE', TOKENS .. id, first * 12 + 8, first * 12 + 11)
      .. redis.call('GETRANGE', TOKENS .. id, last * 12 - 4, last * 12 - 1)
  end
  local prompt = redis.call('HSTRLEN', ROLLOUT .. id, 'prompt') / 4
  return {'r', id, 'a', r[1], 'w', r[2], 'f', first, 'l', last, 'b', r[4] or age(), 'v', versions,
    'k', r[5], 'o', r[6] or '', 's', r[7] or '', 'p', prompt}
end
-- `why`: for people. `cause`: a number of `EndCause`.
local function log_span(fields, why, cause)
  local request = fields[16] == 'request'
  local most = request and math.floor(history_limit() / KEPT_PER_CHATTER) or history_limit()
  redis.call('XADD', request and REQUEST_SPANS or SPANS, 'MAXLEN', '~', most, '*', 'e', age(), 'why', why, 'c', cause, unpack(fields))
end

-- Marks a request (`r:ID`) or a session (`s:ID`) as gone, until `expire` drops the mark.
local function mark_gone(mark)
  if redis.call('ZADD', GONE, age(), mark) == 1 then count('bytes', MARK_BYTES) end
end

-- Whether a rollout that is not here is known to be over. Marks of gone requests are made of the ids that gateways chose, so they bar
-- requests alone; nil for any `kind`.
local function is_over(id, kind)
  if redis.call('SISMEMBER', DONE, 'r:' .. id) == 1 then return true end
  return (kind or 'request') == 'request' and redis.call('ZSCORE', GONE, 'r:' .. id) and true
end

-- Drops up to so many of the oldest marks of what is over beyond those that are kept, but no new ones and none of steps that are not
-- over.
local function drop_marks(most)
  local now, marks = math.floor(age() / 1000), redis.call('LLEN', DONE_ORDER)
  for _ = 1, most do
    if marks <= history_limit() then return end
    local of, at, oldest = string.match(redis.call('LINDEX', DONE_ORDER, 0), '^(%d*) (%-?%d+) (.*)$')
    if math.abs(now - at) < REMEMBERED_S then return end  -- the clock may have been set back
    if of ~= '' and tonumber(of) >= first_step then return end
    redis.call('LPOP', DONE_ORDER)
    redis.call('SREM', DONE, oldest)
    marks = marks - 1
  end
end

-- Marks a rollout (`r:ID`) or an episode (`e:ID`) as over.
local function mark_over(mark, step)
  if redis.call('SADD', DONE, mark) == 0 then return end
  redis.call('RPUSH', DONE_ORDER, string.format('%s %d %s', step or '', math.floor(age() / 1000), mark))
  drop_marks(DROPPED_AT_ONCE)
end

-- The day since the Unix epoch, and the seconds of it.
local function today()
  local s = tonumber(redis.call('TIME')[1])
  return math.floor(s / 86400), s % 86400
end

-- Thousandths of a token that the debt of a key gets back for a rollout that made less than was held for it: what time has not paid off
-- since the charge. The rest would pay off the debts of other requests. `rate`: tokens a minute; nil: none, so it made no debt.
local function refund_of(held, made, rate, charged)
  rate = tonumber(rate or 0)
  if rate == 0 then return 0 end
  local paid = rate * 1000 * math.max(0, age() - charged) / 60000
  return math.max(0, math.floor(math.min((held - made) * 1000, held * 1000 - paid)))
end

-- Ends an open rollout for the account of its key, if it has one: of what was reserved, only what was made is spent.
local function settle_account(id)
  local r = redis.call('HMGET', ROLLOUT .. id, 'account', 'prompt_charge', 'held', 'origin', 'attempts', 'scores', 'rate', 'charged')
  if not r[1] then return end
  local made = made_of(id, r[6])
  if made > 0 or tonumber(r[5]) > 0 then made = made + tonumber(r[2]) end  -- else no engine has read its prompt
  local function add(name, by) return redis.call('HINCRBY', ACCOUNTS, r[1] .. ':' .. name, by) end
  redis.call('HDEL', ROLLOUT .. id, 'account', 'prompt_charge', 'held', 'rate', 'charged')
  local day = today()
  if tonumber(redis.call('HGET', ACCOUNTS, r[1] .. ':day') or 0) ~= day then
    redis.call('HSET', ACCOUNTS, r[1] .. ':day', day, r[1] .. ':today', 0)
  end
  add('spent', made)
  add('today', made)
  add('reserved', 0 - r[3])  -- -0 would be no integer
  local refund = refund_of(tonumber(r[3]), made, r[7], r[8])
  if refund > 0 then add('token_debt', -refund) end
  local group = 'g:' .. string.match(r[4], '^%S+')
  if add(group, -1) <= 0 then
    redis.call('HDEL', ACCOUNTS, r[1] .. ':' .. group)
    add('open', -1)
  end
end

-- Deletes a rollout's data and marks it as over. Returns its attempt if one ran.
local function forget(id)
  settle_account(id)
  local r = redis.call('HMGET', ROLLOUT .. id, 'state', 'cursor', 'attempt', 'step', 'kind', 'scores')
  local ran = r[1] == 'running' and span(id)
  local bytes = redis.call('HSTRLEN', ROLLOUT .. id, 'prompt') + redis.call('STRLEN', TOKENS .. id)
  if r[1] ~= 'finished' then bytes = bytes + tonumber(r[6] or 0) end
  redis.call('DEL', ROLLOUT .. id, TOKENS .. id)
  if r[2] then redis.call('XDEL', FINISHED, r[2]) end
  if r[5] == 'request' then
    redis.call('ZREM', REQUESTS, id)
    mark_gone('r:' .. id)
    if r[1] ~= 'finished' then count('requests_completed', 1) end
  else mark_over('r:' .. id, r[4]) end
  redis.call('ZREM', OPEN, id)
  redis.call('HDEL', FENCE, 'r:' .. id)
  count(r[1], -1)
  count('bytes', -bytes)
  if not ran then return nil end
  log_span(ran, 'cancelled', CAUSE.CANCELLED)
  return r[3]
end

-- Keeps a finished request for a while after now, or as long as its session.
local function keep_request(id)
  settle_account(id)
  local session = redis.call('HGET', KEPT_BY, id)
  redis.call('ZADD', REQUESTS, session and 'inf' or age(), id)
  if session then redis.call('ZADD', IDLE, 'XX', age(), session) end
  count('requests_completed', 1)
end

-- Ends a queued or running rollout and puts it into the finished stream, or among the finished requests. Returns the bytes that were
-- reserved for its scores, 0 if it is not scored.
local function finish(id, state, reason, message)
  redis.call('HDEL', FENCE, 'r:' .. id)
  redis.call('ZREM', OPEN, id)
  local r = redis.call('HMGET', ROLLOUT .. id, 'attempts', 'kind', 'scores')
  local reserved = tonumber(r[3] or 0)
  redis.call('HSET', ROLLOUT .. id, 'state', 'finished', 'reason', reason, 'message', message)
  if r[2] == 'request' then keep_request(id)
  else redis.call('HSET', ROLLOUT .. id, 'cursor', redis.call('XADD', FINISHED, '*', 'id', id)) end
  if state == 'running' then
    if reason == 'CANCELLED' then log_span(span(id), 'cancelled', CAUSE.CANCELLED)
    else log_span(span(id), 'finished', CAUSE.FINISHED) end
  end
  if reason ~= 'CANCELLED' then observe('attempts', tonumber(r[1])) end
  count(state, -1)
  count('finished', 1)
  count('bytes', -reserved)  -- what is stored of them is counted
  return reserved
end

-- Finishes an open request as cancelled; its tokens stay. Returns its attempt, '' if none ran, or nil if it is not open.
local function cancel_request(id, why)
  local r = redis.call('HMGET', ROLLOUT .. id, 'state', 'attempt', 'kind')
  if r[3] ~= 'request' or (r[1] ~= 'queued' and r[1] ~= 'running') then return nil end
  finish(id, r[1], 'CANCELLED', why)
  return r[1] == 'running' and r[2] or ''
end

-- Whether the lease's role is a gateway's.
local function of_gateway(role) return string.sub(role, 1, 8) == 'gateway/' end

-- Deletes the lease of a gateway, by its holder.
local function drop_gateway(holder)
  redis.call('ZREM', GATEWAYS, holder)
  redis.call('HDEL', FENCE, 'lease:gateway/' .. holder, 'settled:gateway/' .. holder)
  redis.call('DEL', SUBMITS .. 'gateway/' .. holder)
end

-- How much of a run's limit the lease's role may use: gateways leave the last quarter of quota and queue to training.
local function part_of(limit, role) return of_gateway(role) and tonumber(limit) * 0.75 or tonumber(limit) end

-- The refusal of so many more bytes for the run if they are beyond its quota; nil if they are within it.
local function beyond_quota(bytes, quota, role)
  local used = tonumber(redis.call('HGET', COUNT, 'bytes') or 0) + history()
  if used + bytes > part_of(quota, role) then return refuse('QUOTA', tostring(used)) end
  return nil
end

-- Makes a branch of a session a trajectory that counts for `n` rollouts.
local function add_trajectory(n, data)
  redis.call('XADD', TRAJECTORIES, '*', 'n', n, 'data', data, 'at', string.format('%.0f', now_ms()))
  count('submitted', n)
  count('trajectories', n)
  count('bytes', #data)
end

-- {session, owner, group, state, reason, turns, its age in ms, ms since it was last used or ended, record, verifier, its reward ('' if
-- there is none)}; nil if it is not here, or of another owner than `owner` ('' for any).
local function session_row(id, owner)
  local r = redis.call('HMGET', SESSION .. id, 'owner', 'group', 'state', 'reason', 'turns', 'opened', 'record', 'verifier', 'reward')
  if not r[1] or (owner ~= '' and owner ~= r[1]) then return nil end
  local waits = r[3] == 'open' or r[3] == 'verifying'
  local last = redis.call('ZSCORE', waits and IDLE or OVER, id)
  local now = tonumber(age())
  return {id, r[1], r[2], r[3], r[4], tonumber(r[5]), now - tonumber(r[6]), now - tonumber(last or now), r[7],
    r[8] or '', r[9] or ''}
end

-- Whether a rollout of an open session is queued or running.
local function has_open_rollout(id)
  for _, rollout in ipairs(redis.call('LRANGE', KEPT .. id, 0, -1)) do
    if redis.call('ZSCORE', OPEN, rollout) then return true end
  end
  return false
end

-- Has a session's rollouts deleted, and forgets its turns. Open ones are cancelled first: {id, attempt or ''} of each, in turn, are
-- appended to `out`.
local function release_rollouts(id, out)
  for _, rollout in ipairs(redis.call('LRANGE', KEPT .. id, 0, -1)) do
    redis.call('HDEL', KEPT_BY, rollout)
    local attempt = cancel_request(rollout, 'its session ended')
    if attempt then out[#out + 1] = rollout; out[#out + 1] = attempt end
    local kind = redis.call('HGET', ROLLOUT .. rollout, 'kind')
    if kind == 'request' then redis.call('ZADD', REQUESTS, '-inf', rollout)
    elseif not kind then mark_gone('r:' .. rollout) end  -- it was not submitted yet
  end
  redis.call('UNLINK', TURNS .. id, TURN_IDS .. id, KEPT .. id)
end

-- Ends an open session, or one that waits for its verdict. `out`: as of release_rollouts. Its record stays for a while.
local function end_session(id, state, reason, out)
  redis.call('ZREM', IDLE, id)
  release_rollouts(id, out)
  redis.call('UNLINK', BRANCHES .. id)
  local r = redis.call('HMGET', SESSION .. id, 'held', 'record', 'unverified')
  if r[3] then
    redis.call('XDEL', UNVERIFIED, r[3])
    redis.call('HDEL', SESSION .. id, 'unverified', 'data')
  end
  local held = #r[2] + SESSION_BYTES
  redis.call('HSET', SESSION .. id, 'state', state, 'reason', reason, 'held', held)
  redis.call('ZADD', OVER, age(), id)
  count('bytes', held - tonumber(r[1]))
  count('sessions_' .. state, 1)
end
