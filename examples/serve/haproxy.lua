-- Asks the limiter about a request. A request that is refused, or about which the limiter says nothing, ends here.
-- If there are several limiters, it asks the next one when the first does not answer.
local LIMITERS = { "http://127.0.0.1:8080/auth/haproxy" }

-- Headers of the client that concern its own connection, or that describe the request to the limiter.
local LEFT_OUT = {
    ["connection"] = true, ["content-length"] = true, ["host"] = true, ["keep-alive"] = true, ["te"] = true,
    ["trailer"] = true, ["transfer-encoding"] = true, ["upgrade"] = true, ["expect"] = true,
}

local function first(headers, name)
    local values = headers and headers[name]
    return values and (values[0] or values[1])
end

core.register_action("ratelimit", { "http-req" }, function(txn)
    local headers = {}
    local asked = txn.http:req_get_headers()
    for name, values in pairs(asked) do
        if not LEFT_OUT[name] then
            local list = {}
            for _, value in pairs(values) do
                list[#list + 1] = value
            end
            headers[name] = list
        end
    end
    headers["x-forwarded-for"] = { tostring(txn.f:src()) }
    headers["x-forwarded-method"] = { txn.f:method() }
    headers["x-forwarded-uri"] = { txn.f:url() }
    headers["x-forwarded-host"] = { first(asked, "host") or "" }

    local answer, is_refusal
    for _, limiter in ipairs(LIMITERS) do
        answer = core.httpclient():get({ url = limiter, headers = headers, timeout = 5000 })
        is_refusal = answer.status == 400 or answer.status == 403 or answer.status == 429
        if is_refusal or answer.status == 200 then
            break
        end
    end
    if answer.status == 200 then
        local limit, policy = first(answer.headers, "ratelimit"), first(answer.headers, "ratelimit-policy")
        if limit then txn:set_var("txn.ratelimit", limit) end
        if policy then txn:set_var("txn.ratelimit_policy", policy) end
        txn:set_var("txn.ratelimit_passed", true)
        return
    end

    local reply = txn:reply({ status = is_refusal and answer.status or 503 })
    if is_refusal or answer.status == 503 then
        for _, name in ipairs({ "content-type", "cache-control", "retry-after", "ratelimit", "ratelimit-policy" }) do
            local value = first(answer.headers, name)
            if value then reply:add_header(name, value) end
        end
        reply:set_body(answer.body or "")
    end
    txn:done(reply)
end)
