-- ARGV: term, columns as JSON, and the tokens of all deltas, one after another. The columns: rollouts, attempts, the rollout's tokens with
-- the delta, the delta's tokens, place (from 1) and reason of each finish in turn, and whether all deltas are expected to be new.
-- Appends without decoding tokens: to a rollout whose fence names the attempt, and whose length then is what the delta says.
-- Returns place, {1 stored | 2 gap | 3 superseded}, stored and finished of each delta that was not stored as sent, in turn.
local columns = cjson.decode(ARGV[2])
local ids, attempts, ends, counts, finishes = columns[1], columns[2], columns[3], columns[4], columns[5]
local fields, reasons = {'term'}, {}
for i = 1, #ids do fields[i + 1] = 'r:' .. ids[i] end
for i = 1, #finishes, 2 do reasons[finishes[i]] = finishes[i + 1] end
local have = redis.call('HMGET', FENCE, unpack(fields))
if have[1] ~= ARGV[1] then return barred(ARGV[1]) end
local call, sub, tokens = redis.call, string.sub, ARGV[3]
local sure = columns[6]  -- else it asks for each rollout's length first: a repeat writes nothing
local over, others = {}, {}  -- over: rollouts that this call finishes

-- Status, stored and finished of a delta whose attempt does not run.
local function ended(place)
  local id = ids[place]
  local r = call('HMGET', ROLLOUT .. id, 'state', 'attempt', 'reason')
  if r[1] == 'finished' and r[2] == attempts[place] and r[3] ~= 'CANCELLED' then return 1, call('STRLEN', TOKENS .. id) / 12, 1 end
  return 3, 0, 0
end

-- Tokens of the rollout if the delta follows its stored ones, or else of what is stored; and whether it was appended.
local function append(place, first, last)
  local key, new = TOKENS .. ids[place], counts[place]
  if not sure or new == 0 then
    local stored = call('STRLEN', key) / 12
    if stored + new ~= ends[place] or new == 0 then return stored, stored + new == ends[place] end
  end
  local stored = call('APPEND', key, sub(tokens, first, last)) / 12
  if stored == ends[place] then return stored, true end
  sure, stored = false, stored - new  -- it was no new one: take it back
  if stored == 0 then call('DEL', key) else call('SET', key, call('GETRANGE', key, 0, stored * 12 - 1)) end
  return stored, false
end

local appended, made, at = 0, 0, 1  -- records, and the tokens that they are
for place = 1, #ids do
  local id, behind = ids[place], at + counts[place] * 12
  local status, stored, finished
  if have[place + 1] == attempts[place] and not over[id] then
    local new
    stored, new = append(place, at, behind - 1)
    if new then appended, made = appended + counts[place], made + counts[place]
    else status, finished = ends[place] <= stored and 1 or 2, 0 end
    if reasons[place] and stored == ends[place] then
      local scored = finish(id, 'running', reasons[place], '') > 0
      if scored and new and counts[place] > 0 then made = made - counts[place] + 1 end
      over[id] = true
      if status then finished = 1 end
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
count('tokens_stored', made)
count('bytes', appended * 12)
settle()
return others
