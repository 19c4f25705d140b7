/* Faults in OpenAI's shape: {"error":{"message","type","param","code"}}. `code` is OpenAI's string
 * where clients look for one (context_length_exceeded, model_not_found, invalid_api_key), else the
 * HTTP status. Nothing of the request is repeated except names the parser has bounded. */
#include "serve/serve_int.h"
#include <stdarg.h>
#include <stdio.h>

static const struct {
    int status;
    const char *type;
} fault_types[] = {
    {400, "invalid_request_error"}, {401, "authentication_error"},      {404, "not_found_error"},
    {405, "invalid_request_error"}, {413, "invalid_request_error"},     {429, "rate_limit_error"},
    {501, "not_implemented_error"}, {503, "service_unavailable_error"},
};

static const char *fault_type(int status)
{
    for (size_t i = 0; i < sizeof fault_types / sizeof *fault_types; i++)
        if (fault_types[i].status == status) return fault_types[i].type;
    return status < 500 ? "invalid_request_error" : "server_error";
}

int serve__fault_set(fault *f, int status, const char *param, const char *fmt, ...)
{
    va_list ap;
    f->status = status;
    f->code = NULL;
    snprintf(f->param, sizeof f->param, "%s", param);
    va_start(ap, fmt);
    vsnprintf(f->msg, sizeof f->msg, fmt, ap);
    va_end(ap);
    return -1;
}

int serve__fault_err(fault *f, const char *param, const err *e)
{
    int status = err_http(e->code);
    if (status < 400 || status == 499) status = 500;
    /* A request that asks for something the model cannot do stays wrong however often it is sent.
     */
    if (e->code == ERR_UNSUPPORTED || e->code == ERR_LIMIT) status = 400;
    serve__fault_set(f, status, param, "%s", e->msg);
    if (e->code == ERR_TOOLONG) f->code = "context_length_exceeded";
    return -1;
}

void serve__fault_write(const fault *f, buf *out)
{
    jw w;
    jw_init(&w, out, 0);
    jw_obj(&w);
    jw_key(&w, "error");
    jw_obj(&w);
    jw_kstr(&w, "message", f->msg);
    jw_kstr(&w, "type", fault_type(f->status));
    jw_kstr(&w, "param", f->param[0] ? f->param : NULL);
    if (f->code)
        jw_kstr(&w, "code", f->code);
    else
        jw_ki64(&w, "code", f->status);
    jw_end_obj(&w);
    jw_end_obj(&w);
}
