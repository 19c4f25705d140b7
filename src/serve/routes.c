/* The route table: one row for each path that the server answers. A path that is here under another
 * method is 405, everything else 404. Prefix rows match a path that continues after them (model
 * names contain slashes). `open` rows answer without the API key: they say nothing about the model
 * or its users. */
#include "serve/serve_int.h"
#include <string.h>

const route serve__routes[] = {
    {"POST", "/v1/chat/completions", false, false, true, serve__chat, "chat completion"},
    {"POST", "/v1/completions", false, false, true, serve__completions, "text completion"},
    {"GET", "/v1/models", false, false, false, serve__models, "served models"},
    {"GET", "/v1/models/", true, false, false, serve__model, "one served model"},
    {"POST", "/tokenize", false, false, false, serve__tokenize, "text or messages to ids"},
    {"POST", "/v1/tokenize", false, false, false, serve__tokenize, "as /tokenize"},
    {"POST", "/detokenize", false, false, false, serve__detokenize, "ids to text"},
    {"POST", "/v1/detokenize", false, false, false, serve__detokenize, "as /detokenize"},
    {"GET", "/tokenizer_info", false, false, false, serve__tokenizer_info, "special tokens"},
    {"GET", "/health", false, true, false, serve__health, "200 when ready, 503 when draining"},
    {"GET", "/ping", false, true, false, serve__health, "as /health"},
    {"GET", "/version", false, false, false, serve__version, "version of the program"},
    {"GET", "/metrics", false, true, false, serve__metrics, "Prometheus text"},
    {"GET", "/server_info", false, false, false, serve__server_info, "model, memory, counters"},
    {"GET", "/get_server_info", false, false, false, serve__server_info, "as /server_info"},
    {"GET", "/", false, true, false, serve__index, "list of routes"},
};
const int serve__n_routes = (int)(sizeof serve__routes / sizeof *serve__routes);

const route *serve__route_find(const char *method, const char *path, const char **rest,
                               const char **allowed)
{
    *rest = "";
    *allowed = NULL;
    for (int i = 0; i < serve__n_routes; i++) {
        const route *r = &serve__routes[i];
        size_t n = strlen(r->path);
        if (r->prefix ? strncmp(path, r->path, n) != 0 || !path[n] : strcmp(path, r->path) != 0)
            continue;
        bool head = !strcmp(method, "HEAD") && !strcmp(r->method, "GET");
        if (!strcmp(method, r->method) || head) {
            *rest = path + n;
            return r;
        }
        *allowed = r->method;
    }
    return NULL;
}
