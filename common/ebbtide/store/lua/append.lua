-- ARGV: term, then rollout, attempt, offset, tokens, finish reason ('' if not the end) of each delta.
-- Tokens are not opened: the fence "ATTEMPT:stored" is compared as it is, and taken apart only where it differs. Returns per delta {1 stored | 2 gap | 3 superseded, stored, finished}.
local fields = {'term'}
for at = 2, #ARGV, 5 do fields[#fields + 1] = 'r:' .. ARGV[at] end
local have = redis.call('HMGET', FENCE, unpack(fields))
if have[1] ~= ARGV[1] then return barred(ARGV[1]) end
local now, set, out = {}, {}, {}
for i = 2, #fields do now[fields[i]] = have[i] end

local function answer(id, attempt, offset, n)
  local field = 'r:' .. id
  local split = now[field] and string.find(now[field], ':', 1, true)
  if not split then  -- not running: it may be this attempt that finished it
    local r = redis.call('HMGET', ROLLOUT .. id, 'state', 'attempt')
    if r[1] == 'finished' and r[2] == attempt then return {1, redis.call('STRLEN', TOKENS .. id) / 12, 1} end
    return {3, 0, 0}
  end
  if string.sub(now[field], 1, split - 1) ~= attempt then return {3, 0, 0} end
  local stored = tonumber(string.sub(now[field], split + 1))
  if offset + n <= stored then return {1, stored, 0} end
  if offset ~= stored then return {2, stored, 0} end
  return nil  -- new tokens that follow on
end

local appended = 0
for at = 2, #ARGV, 5 do
  local id, attempt, tokens, reason = ARGV[at], ARGV[at + 1], ARGV[at + 3], ARGV[at + 4]
  local field, offset, n, reply = 'r:' .. id, tonumber(ARGV[at + 2]), #tokens / 12, nil
  if now[field] ~= attempt .. ':' .. ARGV[at + 2] then reply = answer(id, attempt, offset, n) end
  if not reply then
    if n > 0 then redis.call('APPEND', TOKENS .. id, tokens) end
    now[field] = attempt .. ':' .. (offset + n)
    set[field] = now[field]
    appended = appended + n
    reply = {1, offset + n, 0}
  end
  if reason ~= '' and reply[1] == 1 and reply[3] == 0 and reply[2] == offset + n then
    finish(id, 'running', reason, '')
    now[field], set[field] = false, nil
    reply[3] = 1
  end
  out[#out + 1] = reply
end
local flat = {}
for field, value in pairs(set) do flat[#flat + 1] = field; flat[#flat + 1] = value end
if #flat > 0 then redis.call('HSET', FENCE, unpack(flat)) end
count('tokens_stored', appended)
count('bytes', appended * 12)
settle()
return out
