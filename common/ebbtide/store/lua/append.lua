-- ARGV: term, columns as JSON, and the tokens of all deltas, one after another. The columns: rollouts, attempts, the rollout's tokens with
-- the delta, the delta's tokens, and place (from 1) and reason of each finish, in turn. Appends without decoding tokens: to a rollout whose
-- fence names the attempt, and whose length then is what the delta says.
-- Returns place, {1 stored | 2 gap | 3 superseded}, stored and finished of each delta that was not stored as sent, in turn.
local columns = cjson.decode(ARGV[2])
local ids, attempts, ends, counts, finishes = columns[1], columns[2], columns[3], columns[4], columns[5]
local fields, reasons = {'term'}, {}
for i = 1, #ids do fields[i + 1] = 'r:' .. ids[i] end
for i = 1, #finishes, 2 do reasons[finishes[i]] = finishes[i + 1] end
local have = redis.call('HMGET', FENCE, unpack(fields))
if have[1] ~= ARGV[1] then return barred(ARGV[1]) end
local call, sub, tokens = redis.call, string.sub, ARGV[3]
local over, others = {}, {}  -- over: rollouts that this call finishes

-- 0.2 kept "ATTEMPT:tokens" in the fence. It takes a fence without tokens for one of another attempt, so it never appends at the wrong
-- place when it comes back.
local function fenced_by_02(place)
  local fence, former = have[place + 1], attempts[place] .. ':'
  if not fence or sub(fence, 1, #former) ~= former then return false end
  call('HSET', FENCE, fields[place + 1], attempts[place])
  return true
end

-- Status, stored and finished of a delta whose attempt does not run.
local function ended(place)
  local id = ids[place]
  local r = call('HMGET', ROLLOUT .. id, 'state', 'attempt')
  if r[1] == 'finished' and r[2] == attempts[place] then return 1, call('STRLEN', TOKENS .. id) / 12, 1 end
  return 3, 0, 0
end

-- Removes the tokens behind the first `stored`, and returns status and stored of the delta that they came with.
local function take_back(place, stored)
  local key = TOKENS .. ids[place]
  if stored == 0 then call('DEL', key)
  elseif counts[place] > 0 then call('SET', key, call('GETRANGE', key, 0, stored * 12 - 1)) end
  if ends[place] <= stored then return 1, stored end
  return 2, stored
end

local appended, at = 0, 1
for place = 1, #ids do
  local id, new, behind = ids[place], counts[place], at + counts[place] * 12
  local status, stored, finished
  if (have[place + 1] == attempts[place] or fenced_by_02(place)) and not over[id] then
    finished = 0
    if new > 0 then stored = call('APPEND', TOKENS .. id, sub(tokens, at, behind - 1)) / 12
    else stored = call('STRLEN', TOKENS .. id) / 12 end
    if stored == ends[place] then appended = appended + new
    else status, stored = take_back(place, stored - new) end
    if reasons[place] and stored == ends[place] then
      finish(id, 'running', reasons[place], '')
      over[id], finished = true, 1
    end
  else
    status, stored, finished = ended(place)
  end
  if status then
    local base = #others
    others[base + 1], others[base + 2], others[base + 3], others[base + 4] = place, status, stored, finished
  end
  at = behind
end
count('tokens_stored', appended)
count('bytes', appended * 12)
settle()
return others
