-- ARGV: term, columns as JSON, and the tokens of all deltas, one after another. The columns: rollouts, "ATTEMPT:offset",
-- "ATTEMPT:end", bytes of tokens, and place (from 1) and reason of each finish, in turn. Appends tokens without decoding them: the
-- fence "ATTEMPT:stored" is compared as a text, and parsed only if it differs.
-- Returns place, {1 stored | 2 gap | 3 superseded}, stored and finished of each delta that was not stored as sent, in turn.
local columns = cjson.decode(ARGV[2])
local ids, begins, ends, sizes, finishes = columns[1], columns[2], columns[3], columns[4], columns[5]
local fields, reasons = {'term'}, {}
for i = 1, #ids do fields[i + 1] = 'r:' .. ids[i] end
for i = 1, #finishes, 2 do reasons[finishes[i]] = finishes[i + 1] end
local have = redis.call('HMGET', FENCE, unpack(fields))
if have[1] ~= ARGV[1] then return barred(ARGV[1]) end
local now, set, others = {}, {}, {}
for i = 2, #fields do now[fields[i]] = have[i] end

-- Status, stored and finished of a delta whose fence differs; nil for new tokens that follow the stored ones.
local function differs(id, attempt, offset, n)
  local fence = now['r:' .. id]
  local split = fence and string.find(fence, ':', 1, true)
  if not split then  -- not running: perhaps this attempt finished it
    local r = redis.call('HMGET', ROLLOUT .. id, 'state', 'attempt')
    if r[1] == 'finished' and r[2] == attempt then return 1, redis.call('STRLEN', TOKENS .. id) / 12, 1 end
    return 3, 0, 0
  end
  if string.sub(fence, 1, split - 1) ~= attempt then return 3, 0, 0 end
  local stored = tonumber(string.sub(fence, split + 1))
  if offset + n <= stored then return 1, stored, 0 end
  if offset ~= stored then return 2, stored, 0 end
  return nil
end

local appended, at = 0, 0
for place = 1, #ids do
  local id, field, size, reason = ids[place], fields[place + 1], sizes[place], reasons[place]
  local status, stored, finished
  if now[field] ~= begins[place] then
    local split = string.find(begins[place], ':', 1, true)
    local attempt, offset = string.sub(begins[place], 1, split - 1), tonumber(string.sub(begins[place], split + 1))
    status, stored, finished = differs(id, attempt, offset, size / 12)
    if status == 1 and finished == 0 and reason and stored == offset + size / 12 then
      finish(id, 'running', reason, '')
      now[field], set[field], finished = false, nil, 1
    end
  end
  if status then
    local base = #others
    others[base + 1], others[base + 2], others[base + 3], others[base + 4] = place, status, stored, finished
  else
    if size > 0 then redis.call('APPEND', TOKENS .. id, string.sub(ARGV[3], at + 1, at + size)) end
    appended = appended + size
    if reason then
      finish(id, 'running', reason, '')
      now[field], set[field] = false, nil
    else
      now[field], set[field] = ends[place], ends[place]
    end
  end
  at = at + size
end
local flat = {}
for field, value in pairs(set) do flat[#flat + 1] = field; flat[#flat + 1] = value end
if #flat > 0 then redis.call('HSET', FENCE, unpack(flat)) end
count('tokens_stored', appended / 12)
count('bytes', appended)
settle()
return others
